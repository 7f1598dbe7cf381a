#pragma once
// Words of a section of bits that begins at any byte; the first bit is the lowest one of the first byte.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace telegrad::kernels {

static_assert(std::endian::native == std::endian::little);

inline std::uint64_t load_word(const std::byte* from) {
  std::uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

inline void store_word(std::byte* to, std::uint64_t word) { std::memcpy(to, &word, sizeof word); }

constexpr std::uint64_t low_bits(std::size_t count) { return (std::uint64_t{1} << count) - 1; }

}  // namespace telegrad::kernels
