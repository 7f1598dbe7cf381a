#pragma once
// The loops of value_groups.hpp in plain C++, and what all levels have in common. Values and planes of SIMD levels end at
// any group: what is left is done here.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec/bit_words.hpp"
#include "codec/value_groups.hpp"

namespace telegrad::kernels {

inline constexpr std::uint64_t kEveryByte = 0x0101010101010101U;

// Bit j of the result is the lowest bit of byte j.
inline std::uint64_t gather_bits(std::uint64_t bytes) { return ((bytes & kEveryByte) * 0x0102040810204080U) >> 56; }
// The other way.
inline std::uint64_t spread_bits(std::uint64_t bits) {
  const std::uint64_t each = bits * kEveryByte & 0x8040201008040201U;
  return (each + 0x7f * kEveryByte) >> 7 & kEveryByte;
}

// Of the values of a group that `marks` marks.
inline void write_escapes(std::uint64_t marks, const std::uint8_t* exponents, ValuePlanes<std::byte>& planes) {
  for (; marks != 0 && planes.escapes != planes.end; marks &= marks - 1) {
    *planes.escapes++ = std::byte{exponents[std::countr_zero(marks)]};
  }
}

// Gives them their exponents, in words already written with those of their codes.
template <class W>
bool read_escapes(std::uint64_t marks, ValuePlanes<const std::byte>& planes, std::byte* values) {
  if (std::popcount(marks) > planes.end - planes.escapes) return false;
  for (; marks != 0; marks &= marks - 1) {
    std::byte* const at = values + static_cast<std::size_t>(std::countr_zero(marks)) * sizeof(W);
    W word = ValueParts<W>::load(at);
    constexpr W kMask = static_cast<W>(W{0xff} << ValueParts<W>::kExponent);
    const W exponent = static_cast<W>(std::to_integer<W>(*planes.escapes++) << ValueParts<W>::kExponent);
    word = static_cast<W>((word & ~kMask) | exponent);
    std::memcpy(at, &word, sizeof word);
  }
  return true;
}

template <class W>
std::size_t count_portable(const std::byte* values, std::size_t count, ValueBlock block) {
  const unsigned coded = coded_exponents(block.width);
  std::size_t escapes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto exponent = ValueParts<W>::exponent(ValueParts<W>::load(values + i * sizeof(W)));
    escapes += static_cast<std::uint8_t>(block.top - exponent) >= coded ? 1U : 0U;
  }
  return escapes;
}

template <class W>
void write_portable(const std::byte* values, std::size_t count, ValueBlock block, ValuePlanes<std::byte> planes) {
  using Parts = ValueParts<W>;
  const auto escape = static_cast<std::uint8_t>(coded_exponents(block.width));
  for (std::size_t begin = 0; begin < count; begin += kValueGroup) {
    const std::size_t held = std::min(kValueGroup, count - begin);
    std::uint8_t exponents[kValueGroup];
    std::uint8_t codes[kValueGroup] = {};
    std::uint64_t escaped = 0;
    for (std::size_t i = 0; i < held; ++i) {
      const W word = Parts::load(values + (begin + i) * sizeof(W));
      exponents[i] = Parts::exponent(word);
      codes[i] = std::min(static_cast<std::uint8_t>(block.top - exponents[i]), escape);
      escaped |= std::uint64_t{codes[i] == escape} << i;
      *planes.heads++ = std::byte{Parts::head(word)};
      if constexpr (Parts::kTails) {
        const std::uint16_t tail = Parts::tail(word);
        std::memcpy(planes.tails, &tail, sizeof tail);
        planes.tails += sizeof tail;
      }
    }
    for (unsigned bit = 0; bit < block.width; ++bit) {
      std::uint64_t plane = 0;
      for (unsigned octet = 0; octet < 8; ++octet) {
        plane |= gather_bits(load_word(reinterpret_cast<const std::byte*>(codes) + 8 * octet) >> bit) << 8 * octet;
      }
      store_word(planes.codes, plane);
      planes.codes += sizeof plane;
    }
    if (block.width != 0) write_escapes(escaped, exponents, planes);
  }
}

template <class W>
bool read_portable(ValuePlanes<const std::byte> planes, ValueBlock block, std::byte* values, std::size_t count) {
  using Parts = ValueParts<W>;
  const auto escape = static_cast<std::uint8_t>(coded_exponents(block.width));
  for (std::size_t begin = 0; begin < count; begin += kValueGroup) {
    const std::size_t held = std::min(kValueGroup, count - begin);
    std::uint64_t octets[kValueGroup / 8] = {};
    std::uint64_t any = 0;
    for (unsigned bit = 0; bit < block.width; ++bit) {
      const std::uint64_t plane = load_word(planes.codes);
      planes.codes += sizeof plane;
      any |= plane;
      for (unsigned octet = 0; octet < 8; ++octet) octets[octet] |= spread_bits(plane >> 8 * octet & 255U) << bit;
    }
    if (held < kValueGroup && any >> held != 0) return false;
    std::uint8_t codes[kValueGroup];
    std::memcpy(codes, octets, sizeof codes);
    std::uint64_t escaped = 0;
    for (std::size_t i = 0; i < held; ++i) {
      escaped |= std::uint64_t{codes[i] == escape} << i;
      std::uint16_t tail = 0;
      if constexpr (Parts::kTails) {
        std::memcpy(&tail, planes.tails, sizeof tail);
        planes.tails += sizeof tail;
      }
      const auto exponent = static_cast<std::uint8_t>(block.top - codes[i]);
      const W word = Parts::join(exponent, std::to_integer<std::uint8_t>(*planes.heads++), tail);
      std::memcpy(values + (begin + i) * sizeof word, &word, sizeof word);
    }
    if (block.width != 0 && !read_escapes<W>(escaped, planes, values + begin * sizeof(W))) return false;
  }
  return planes.escapes == planes.end;
}

}  // namespace telegrad::kernels
