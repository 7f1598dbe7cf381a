#pragma once
// Random rows for tests of linear models.

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "linear/model.hpp"

struct Sample {
  std::vector<std::uint64_t> offsets{0};
  std::vector<std::uint32_t> indices;
  std::vector<float> values, targets, weights;

  Sample(std::size_t features, std::size_t rows, unsigned seed, unsigned most_entries = 12) : weights(features) {
    std::mt19937 random(seed);
    const auto number = [&] { return static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 500; };
    std::generate(weights.begin(), weights.end(), number);
    for (std::size_t row = 0; row < rows; ++row) {
      std::map<std::uint32_t, float> entries;
      for (std::size_t entry = features == 0 ? 0 : random() % most_entries; entry > 0; --entry) {
        entries[static_cast<std::uint32_t>(random() % features)] = number();
      }
      for (const auto& [index, value] : entries) {
        indices.push_back(index);
        values.push_back(value);
      }
      offsets.push_back(indices.size());
      targets.push_back(random() % 2 == 0 ? -1.0F : 1.0F);
    }
  }

  telegrad::linear::RowsView view() const { return {offsets, indices, values}; }
};
