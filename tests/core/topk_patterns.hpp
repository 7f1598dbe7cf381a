// What ranks may hold: easy and adversarial, for sums that keep a part.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "sparse_samples.hpp"

namespace telegrad {

// What ranks select in call number `time`.
using Pattern = std::function<std::vector<std::uint32_t>(Rank rank, Rank size, int time, std::uint64_t n, Random& random)>;

inline std::vector<std::uint32_t> within(std::uint64_t begin, std::uint64_t end, std::size_t count, Random& random) {
  std::vector<std::uint32_t> indices;
  for (std::size_t i = 0; i < count; ++i) indices.push_back(static_cast<std::uint32_t>(begin + random.below(end - begin)));
  std::ranges::sort(indices);
  const auto repeated = std::ranges::unique(indices);
  indices.erase(repeated.begin(), repeated.end());
  return indices;
}

inline constexpr std::size_t kK = 300;

inline const std::pair<const char*, Pattern> kPatterns[] = {
    {"uniform", [](Rank, Rank, int, std::uint64_t n, Random& random) { return within(0, n, kK, random); }},
    {"one slice", [](Rank, Rank size, int, std::uint64_t n, Random& random) { return within(0, n / size, kK, random); }},
    {"one rank clustered elsewhere",
     [](Rank rank, Rank, int, std::uint64_t n, Random& random) {
       return rank == 0 ? within(n - n / 50, n, kK, random) : within(0, n / 50, kK, random);
     }},
    {"gone stale",
     [](Rank, Rank size, int time, std::uint64_t n, Random& random) {
       const std::uint64_t at = static_cast<std::uint64_t>(time) % size;
       return within(n * at / size, n * (at + 1) / size, kK, random);
     }},
    {"identical",
     [](Rank, Rank, int time, std::uint64_t n, Random&) {
       Random same(static_cast<std::uint64_t>(time));
       return within(0, n / 3, kK, same);
     }},
    {"disjoint",
     [](Rank rank, Rank size, int, std::uint64_t n, Random& random) {
       return within(n * rank / size, n * (rank + 1) / size, kK, random);
     }},
    {"one entry for all",
     [](Rank, Rank, int, std::uint64_t n, Random&) {
       return std::vector<std::uint32_t>{static_cast<std::uint32_t>(n - 1)};
     }},
    {"a solid run",
     [](Rank, Rank, int, std::uint64_t n, Random&) {
       std::vector<std::uint32_t> indices(kK);
       std::iota(indices.begin(), indices.end(), static_cast<std::uint32_t>(n / 2));
       return indices;
     }},
    {"very unequal",
     [](Rank rank, Rank size, int, std::uint64_t n, Random& random) {
       return within(0, n, rank == size / 2 ? kK : rank % 3, random);
     }},
    {"nobody", [](Rank, Rank, int, std::uint64_t, Random&) { return std::vector<std::uint32_t>(); }},
};

inline std::vector<Input<float>> inputs_of(const Pattern& pattern, Rank size, int time, std::uint64_t n, std::uint64_t seed) {
  std::vector<Input<float>> inputs(size);
  Random random(seed + static_cast<std::uint64_t>(time));
  for (Rank rank = 0; rank < size; ++rank) {
    inputs[rank].indices = pattern(rank, size, time, n, random);
    for (std::size_t i = 0; i < inputs[rank].indices.size(); ++i) {
      // Large ones lie together, so that shares of the sum are unlike.
      const float scale = inputs[rank].indices[i] < n / 100 ? 8.0F : 1.0F;
      inputs[rank].values.push_back(scale * static_cast<float>(random.uniform() - 0.4));
    }
  }
  return inputs;
}

}  // namespace telegrad
