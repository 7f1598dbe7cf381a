#pragma once
// Golomb–Rice code of strictly increasing indices: `width` low bits of each gap, less the one that strictness takes, and the
// rest of it in unary. Golomb, "Run-length encodings", IEEE Trans. Information Theory 12(3), 1966; Rice, JPL Publication
// 79-22, 1979. Of uniform indices it takes about log2(1/d) + 1.5 bits each, half a bit less than Elias–Fano: there the
// unary part has what the low parts of all indices before sum up to, too.
//
// Both have the same two sections, if one subtracts from each index the low parts of the gaps before it. So these functions
// turn indices into numbers that elias_fano_encode() takes, and back what elias_fano_decode() gives.

#include <cstdint>
#include <span>

namespace telegrad::kernels {

/// numbers[j] = indices[j + 1] less the low parts of the gaps before it; one number fewer than indices (CHECKed), which are
/// strictly increasing and at most kEliasFanoMost + 1. width <= 31.
void gap_numbers(std::span<const std::uint32_t> indices, unsigned width, std::span<std::uint32_t> numbers);
/// The last of these, or the one index.
std::uint32_t last_gap_number(std::span<const std::uint32_t> indices, unsigned width);

/// The reverse, in place: indices[0] is the first index, numbers follow it. From numbers that are none come indices that may
/// have wrapped around, but no other memory is touched.
void gap_indices(std::span<std::uint32_t> indices, unsigned width);

namespace reference {
void gap_numbers(std::span<const std::uint32_t> indices, unsigned width, std::span<std::uint32_t> numbers);
void gap_indices(std::span<std::uint32_t> indices, unsigned width);
}  // namespace reference

}  // namespace telegrad::kernels
