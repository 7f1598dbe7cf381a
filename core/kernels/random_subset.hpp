#pragma once
// Random-k: entries chosen without a look at them, the same ones whenever the same draw is made.

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/ranked.hpp"

namespace telegrad::kernels {

/// What a random choice depends on, and nothing else: no SIMD level, no earlier draw.
struct Draw {
  std::uint64_t seed;
  std::uint32_t call;
  std::uint32_t rank;
  std::uint32_t vector;  // such as a parameter
};

/// indices.size() different indices below `size`, ascending; every set of so many is equally likely (to 2^-32). `size`
/// is at most 2^32, and there are no more indices than that (CHECKed).
void random_subset(const Draw& draw, std::size_t size, std::span<std::uint32_t> indices);

/// Adds `gradient` to `residual` (nothing, if it is empty), then moves a random subset, as large as `out`, out of it.
Chosen accumulate_random(std::span<float> residual, std::span<const float> gradient, const Draw& draw,
                         std::uint32_t index_offset, EntriesOut<float> out);

namespace reference {
void random_subset(const Draw& draw, std::size_t size, std::span<std::uint32_t> indices);
}  // namespace reference

}  // namespace telegrad::kernels
