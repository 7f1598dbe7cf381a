#pragma once
// Elias–Fano code of a short strictly increasing sequence s₁ < s₂ < … < s_n of numbers above a known s₀. Elias,
// "Efficient storage and retrieval by content and address of static files", J. ACM 21(2), 1974; Fano, 1971.
//
// Counted without the numbers that strictness skips, offset_j = s_j − s₀ − j, j = 1 … n, the sequence only does not
// decrease. `width` low bits of each offset stand one behind the other, the lowest first; the rest in unary: bit
// (offset_j >> width) + j − 1 of the high section is set. With the best width that takes about log2(1/d) + 2 bits a
// number at a small density d, and with width 0 it is the bitmap of the numbers there: one formula from the rarest to
// the densest.
//
// Sections are little-endian. Every level gives the same bytes and numbers.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace telegrad::kernels {

inline constexpr std::size_t kEliasFanoMost = 1024;       // numbers of one sequence
inline constexpr std::size_t kEliasFanoSlackBytes = 64;  // behind a section that kernels may read, and overwrite

/// The width with the shortest code for `count` offsets up to `spread`: ⌊log2(spread / count)⌋, 0 where that is less.
constexpr unsigned elias_fano_width(std::uint32_t count, std::uint32_t spread) {
  if (count == 0 || spread < count) return 0;
  const auto width = static_cast<unsigned>(std::bit_width(spread) - std::bit_width(count));
  return spread >> width >= count ? width : width - 1;
}

constexpr std::size_t elias_fano_low_bytes(std::uint32_t count, unsigned width) {
  return (std::size_t{count} * width + 7) / 8;
}

/// For offsets up to `spread`.
constexpr std::size_t elias_fano_high_bytes(std::uint32_t count, std::uint32_t spread, unsigned width) {
  return count == 0 ? 0 : (std::size_t{count} + (spread >> width) + 7) / 8;
}

/// Writes the two sections of `numbers`, which must be strictly increasing and above `before`. The low section is
/// written first: the high one may lie right behind it. At most kEliasFanoMost numbers, width <= 31 (CHECKed).
void elias_fano_encode(std::span<const std::uint32_t> numbers, std::uint32_t before, unsigned width, std::byte* lows,
                       std::byte* highs, std::size_t high_bytes);

/// Reads numbers.size() numbers; false where the high section has another number of set bits. Any bytes are safe: from
/// damaged ones come numbers in no order. At most kEliasFanoMost numbers, width <= 31 (CHECKed).
bool elias_fano_decode(const std::byte* lows, const std::byte* highs, std::size_t high_bytes, std::uint32_t before,
                       unsigned width, std::span<std::uint32_t> numbers);

namespace reference {
void elias_fano_encode(std::span<const std::uint32_t> numbers, std::uint32_t before, unsigned width, std::byte* lows,
                       std::byte* highs, std::size_t high_bytes);
bool elias_fano_decode(const std::byte* lows, const std::byte* highs, std::size_t high_bytes, std::uint32_t before,
                       unsigned width, std::span<std::uint32_t> numbers);
}  // namespace reference

}  // namespace telegrad::kernels
