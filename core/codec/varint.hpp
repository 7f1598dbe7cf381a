#pragma once
// Unsigned integers in seven bits a byte, the lowest first; the top bit of a byte says that another one follows (LEB128).

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/types.hpp"

namespace telegrad {

inline constexpr std::size_t kVarintBytesMost = 10;

constexpr std::size_t varint_bytes(std::uint64_t value) {
  std::size_t bytes = 1;
  for (; value >= 0x80; value >>= 7) ++bytes;
  return bytes;
}

/// What `count` numbers of this `sum` take at most: few of them are large.
constexpr std::uint64_t varints_bytes_most(std::uint64_t count, std::uint64_t sum) {
  std::uint64_t bytes = count;
  for (sum >>= 7; sum > 0; sum >>= 7) bytes += std::min(count, sum);
  return bytes;
}

/// Returns the place behind it; there must be room for kVarintBytesMost.
inline std::byte* put_varint(std::byte* at, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) *at++ = static_cast<std::byte>(value | 0x80);
  *at++ = static_cast<std::byte>(value);
  return at;
}

/// Takes one from the front of `bytes`; false if there is none, or one of more than 64 bits.
inline bool take_varint(ConstBytes& bytes, std::uint64_t& value) {
  value = 0;
  for (unsigned shift = 0; shift < 64 && !bytes.empty(); shift += 7) {
    const auto byte = std::to_integer<std::uint64_t>(bytes.front());
    bytes = bytes.subspan(1);
    if (shift == 63 && byte > 1) return false;
    value |= (byte & 0x7f) << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

}  // namespace telegrad
