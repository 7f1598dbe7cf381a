// Sparse inputs of ranks, and what must come out of their sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "base/random.hpp"
#include "base/types.hpp"
#include "kernel_samples.hpp"
#include "codec/sparse_vector.hpp"

namespace telegrad {

template <class V>
struct Input {
  std::vector<std::uint32_t> indices;
  std::vector<V> values;
  SparseVector<V> vector(std::uint64_t n) const { return SparseVector<V>::sparse(n, indices, values); }
};

// Each index with probability `density`; small integers.
template <class V>
Input<V> uniform(std::uint64_t n, double density, Random& random) {
  Input<V> input;
  for (std::uint32_t i = 0; i < n; ++i) {
    if (random.uniform() >= density) continue;
    input.indices.push_back(i);
    input.values.push_back(static_cast<V>(static_cast<float>(random.below(7)) - 3.0F));
  }
  return input;
}

template <class V = float>
float neutral(Reduction reduction) {
  using Limits = std::numeric_limits<std::conditional_t<std::is_integral_v<V>, V, float>>;
  if (reduction == Reduction::prod) return 1.0F;
  if (reduction != Reduction::min && reduction != Reduction::max) return 0.0F;
  if constexpr (std::is_integral_v<V>) return static_cast<float>(reduction == Reduction::min ? Limits::max() : Limits::min());
  return reduction == Reduction::min ? Limits::infinity() : -Limits::infinity();
}

template <class V>
std::vector<float> dense_result(const std::vector<Input<V>>& inputs, std::uint64_t n, Reduction reduction) {
  std::vector<float> result(n, neutral<V>(reduction));
  for (const auto& input : inputs) {
    for (std::size_t i = 0; i < input.indices.size(); ++i) {
      float& at = result[input.indices[i]];
      at = samples::combined(at, static_cast<float>(input.values[i]), reduction);
    }
  }
  if (reduction != Reduction::avg) return result;
  using Wide = std::conditional_t<std::is_same_v<V, double>, double, float>;
  const Wide factor = Wide{1} / static_cast<Wide>(inputs.size());
  for (float& value : result) value = static_cast<float>(static_cast<V>(static_cast<Wide>(value) * factor));
  return result;
}

template <class V>
std::vector<float> as_floats(std::span<const V> values) {
  std::vector<float> floats;
  for (const V value : values) floats.push_back(static_cast<float>(value));
  return floats;
}

template <class V>
bool same_bits(const SparseVector<V>& a, const SparseVector<V>& b) {
  return a.is_dense() == b.is_dense() && a.dimension() == b.dimension() &&
         std::ranges::equal(a.indices(), b.indices()) && a.values().size() == b.values().size() &&
         (a.values().empty() || std::memcmp(a.values().data(), b.values().data(), a.values().size_bytes()) == 0);
}

}  // namespace telegrad
