#pragma once
// The fused pass of selection: residual += gradient, pack what reaches a threshold, clear it; and what else one pass can
// learn of the sums on its way. It reads residual and gradient once and writes the residual once.

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/entries.hpp"
#include "kernels/key.hpp"

namespace telegrad::kernels {

/// Of the sums residual + gradient, before any is cleared. The sum has 16 lanes of doubles, element i in lane i % 16,
/// folded by halves: the same bits at every SIMD level.
struct Moments {
  std::size_t count = 0;  // entries of the side; for both all there are
  double sum = 0.0;       // of their magnitudes
  float max = 0.0F;       // the largest of their magnitudes
  float largest = 0.0F;   // the largest magnitude of all, whatever the side

  double mean() const { return count == 0 ? 0.0 : sum / static_cast<double>(count); }
};

/// residual += gradient; every entry of the side whose key is at least `bound` is packed (its position + index_offset,
/// ascending, and its value) and cleared in the residual. key_of_threshold() makes a bound of a magnitude.
/// Returns how many were selected. Where that is more than the capacity of `out`, only the first are written and
/// cleared; the others stay in the residual, accumulated.
/// `residual` and `gradient` have one length, or `gradient` is empty and nothing is added (CHECKed). What lies in `out`
/// between the count and the capacity is undefined afterwards. `moments`, if given, is overwritten. With `before`, as
/// long as `residual`, it is residual = before + gradient (CHECKed: there is one): what the residual holds is not read.
std::size_t accumulate_select(std::span<float> residual, std::span<const float> gradient, std::int32_t bound, Side side,
                              std::uint32_t index_offset, EntriesOut<float> out, Moments* moments = nullptr,
                              std::span<const float> before = {});

/// residual += gradient (nothing, if that is empty), and what the sums are like.
Moments accumulate_moments(std::span<float> residual, std::span<const float> gradient, Side side);

namespace reference {
std::size_t accumulate_select(std::span<float> residual, std::span<const float> gradient, std::int32_t bound, Side side,
                              std::uint32_t index_offset, EntriesOut<float> out, Moments* moments = nullptr,
                              std::span<const float> before = {});
}  // namespace reference

}  // namespace telegrad::kernels
