// Training without a model, whose gradients are exchanged by an allreduce that keeps a part of the sum.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "collectives/topk/result.hpp"
#include "sparse_samples.hpp"

namespace telegrad {

// Residuals grow by gradients, whole numbers so that sums are exact, and give what reaches a threshold of their own.
struct Training {
  explicit Training(Rank size) : residuals(size, std::vector<float>(kN)), thresholds(size) {}

  std::vector<Input<float>> select(int time, std::uint64_t k, Random& random) {
    std::vector<Input<float>> inputs(residuals.size());
    for (std::size_t rank = 0; rank < residuals.size(); ++rank) {
      std::vector<float>& residual = residuals[rank];
      for (std::size_t i = 0; i < kN; ++i) {  // the variance differs from place to place, and changes slowly
        const double width = 40.0 + 30.0 * std::sin(static_cast<double>(i) / 2000.0 + time / 100.0);
        double noise = -6.0;
        for (int j = 0; j < 12; ++j) noise += random.uniform();
        residual[i] += static_cast<float>(std::round(width * noise));
      }
      if (time % 8 == 0) {
        std::vector<float> sizes;
        for (const float value : residual) sizes.push_back(std::abs(value));
        std::ranges::nth_element(sizes, sizes.begin() + static_cast<std::ptrdiff_t>(k), std::greater<>());
        thresholds[rank] = sizes[k];
      }
      for (std::uint32_t i = 0; i < kN; ++i) {
        if (std::abs(residual[i]) < thresholds[rank]) continue;
        inputs[rank].indices.push_back(i);
        inputs[rank].values.push_back(std::exchange(residual[i], 0.0F));
      }
    }
    return inputs;
  }

  // What all ranks hold, and have given.
  std::vector<double> totals(const std::vector<Input<float>>& inputs = {}) const {
    std::vector<double> totals(kN);
    for (const auto& residual : residuals) {
      for (std::size_t i = 0; i < kN; ++i) totals[i] += residual[i];
    }
    for (const auto& input : inputs) {
      for (std::size_t i = 0; i < input.indices.size(); ++i) totals[input.indices[i]] += input.values[i];
    }
    return totals;
  }

  // What is left goes back; false if that and the sum are not all of `before`.
  template <class State>
  bool give_back(const std::vector<TopkResult<float, State>>& results, const std::vector<double>& before) {
    for (std::size_t rank = 0; rank < results.size(); ++rank) {
      const SparseVector<float>& left = results[rank].left;
      for (std::size_t i = 0; i < left.nnz(); ++i) residuals[rank][left.indices()[i]] += left.values()[i];
    }
    std::vector<float> taken(kN);
    results[0].sum.write_dense(taken);
    const std::vector<double> after = totals();
    bool is_whole = true;
    for (std::size_t i = 0; i < kN; ++i) is_whole &= after[i] + taken[i] == before[i];
    return is_whole;
  }

  static constexpr std::size_t kN = 6000;
  std::vector<std::vector<float>> residuals;
  std::vector<float> thresholds;
};

}  // namespace telegrad
