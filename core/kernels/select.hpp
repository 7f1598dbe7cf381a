#pragma once
// Selection of the largest gradients: one fused pass by threshold, and the exact threshold of a top-k.
//
// Magnitudes are ordered by the bits of |x|, so a NaN counts as larger than infinity: it is selected (and cleared),
// rather than hiding in a residual for ever.

#include <cstddef>
#include <cstdint>
#include <span>

namespace telegrad::kernels {

/// residual += gradient; every entry with |residual| >= threshold is packed (its position + index_offset, ascending,
/// and its value) and cleared in the residual. A threshold <= 0 selects everything, zeros too.
/// Returns how many were selected. Where that is more than the capacity, only the first `capacity` are written and
/// cleared; the others stay in the residual, accumulated.
/// `residual` and `gradient` have one length, `indices` and `values` have one length, the capacity (both CHECKed). What
/// lies in the outputs between the count and the capacity is undefined afterwards.
std::size_t accumulate_select(std::span<float> residual, std::span<const float> gradient, float threshold,
                              std::uint32_t index_offset, std::span<std::uint32_t> indices, std::span<float> values);

/// The k-th largest |x|, exactly; 1 <= k <= x.size() (CHECKed).
float topk_threshold(std::span<const float> x, std::size_t k);

namespace reference {
std::size_t accumulate_select(std::span<float> residual, std::span<const float> gradient, float threshold,
                              std::uint32_t index_offset, std::span<std::uint32_t> indices, std::span<float> values);
float topk_threshold(std::span<const float> x, std::size_t k);
}  // namespace reference

}  // namespace telegrad::kernels
