#pragma once
// Groups of 64 values of a block that is neither raw nor of several headers: the loops of pack_values(). All levels write
// and read the same bytes.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec/pack_values.hpp"

namespace telegrad::kernels {

inline constexpr std::size_t kValueGroup = 64;
inline constexpr unsigned kCodeWidthMost = 5;  // a wider code saves too little
inline constexpr unsigned kRawWidth = 8;

/// How many exponents a code of this width tells apart.
constexpr unsigned coded_exponents(unsigned width) { return width == 0 ? 1 : (1U << width) - 1; }

/// What a block of `count` values takes.
constexpr std::size_t block_bytes(DType dtype, ValueBlock block, std::size_t count) {
  if (block.width == kRawWidth) return kValueHeaderBytes + count * size_of(dtype);
  const std::size_t groups = (count + kValueGroup - 1) / kValueGroup;
  return kValueHeaderBytes + groups * block.width * sizeof(std::uint64_t) + count * (size_of(dtype) - 1) + block.escapes;
}

/// Where the sections of a block lie.
template <class Byte>
struct ValuePlanes {
  Byte* codes;
  Byte* heads;
  Byte* tails;
  Byte* escapes;
  Byte* end;

  ValuePlanes(DType dtype, ValueBlock block, std::size_t count, Byte* payload)
      : codes(payload),
        heads(codes + (count + kValueGroup - 1) / kValueGroup * block.width * sizeof(std::uint64_t)),
        tails(heads + count),
        escapes(tails + count * (size_of(dtype) - 2)),
        end(escapes + block.escapes) {}
};

/// How many of the values have an exponent that a code of the block's width cannot say.
std::size_t count_escapes(DType dtype, const std::byte* values, std::size_t count, ValueBlock block);

/// Fills the planes. Writes no more escapes than there is room for.
void write_groups(DType dtype, const std::byte* values, std::size_t count, ValueBlock block,
                  ValuePlanes<std::byte> planes);

/// False where there are more or fewer escapes than the header says, or codes behind the last value.
bool read_groups(DType dtype, ValuePlanes<const std::byte> planes, ValueBlock block, std::byte* values,
                 std::size_t count);

/// The parts of a value of type W, of 32 bits for f32 and of 16 for bf16.
template <class W>
struct ValueParts {
  static constexpr unsigned kHalf = 8 * sizeof(W) - 16;  // bits below the upper half
  static constexpr unsigned kExponent = kHalf + 7;
  static constexpr bool kTails = sizeof(W) == 4;

  static W load(const std::byte* from) {
    W word;
    std::memcpy(&word, from, sizeof word);
    return word;
  }
  static std::uint8_t exponent(W word) { return static_cast<std::uint8_t>(word >> kExponent); }
  static std::uint8_t head(W word) {
    return static_cast<std::uint8_t>((word >> kHalf & 0x7fU) | (word >> (kHalf + 8) & 0x80U));
  }
  static std::uint16_t tail(W word) { return static_cast<std::uint16_t>(word); }
  static W join(std::uint8_t exponent, std::uint8_t head, std::uint16_t tail) {
    const std::uint32_t half = (head & 0x80U) << 8 | std::uint32_t{exponent} << 7 | (head & 0x7fU);
    return kTails ? static_cast<W>(half << kHalf | tail) : static_cast<W>(half);
  }
};

}  // namespace telegrad::kernels
