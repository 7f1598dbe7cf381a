#pragma once
// Floating-point values in fewer bytes without any loss: of gradients, sign and fraction are noise, but exponents lie close
// together, and 8 bits hold some 2.5 bits of information (Hershcovitch et al., "ZipNN: lossless compression for AI models",
// arXiv 2411.05239, 2024). So exponents are cut down to what sets them apart within a block; everything else is copied.
// Of f32 and of bf16, which is the upper half of one.
//
// Blocks of 1,024 values (the last one has the rest) stand one behind the other, filled up with zeros to a multiple of 8
// bytes:
//
//   4 bytes    u8 top, u8 width, u16 number of escapes
//   codes      in groups of 64 values (the last one filled up with zeros): `width` words of 64 bits, word j with bit j of
//              each value's code. A code is top − exponent (modulo 256) where that is below 2^width − 1; else all ones, an
//              escape. Width 0: every exponent is `top`
//   heads      a byte a value: the sign, then the upper 7 bits of the fraction
//   tails      f32: the lower 16 bits of each value
//   escapes    exponents of the values whose code says so, in order
//
// or, of width 8, the values as they are: a block is never longer than its values and 4 bytes.
//
// One width in a block takes 0.6 to 1 bit a value more than entropy codes would, and needs no tables: 64 codes are read
// and written at once.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/types.hpp"

namespace telegrad::kernels {

inline constexpr std::size_t kValueBlock = 1024;
inline constexpr std::size_t kValueHeaderBytes = 4;

/// Whether there is such a packing of values of that type.
constexpr bool packs_values(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16; }

/// The header of a block.
struct ValueBlock {
  std::uint8_t top = 0;
  std::uint8_t width = 0;
  std::uint16_t escapes = 0;
};
static_assert(sizeof(ValueBlock) == kValueHeaderBytes);

/// How some values are packed, and into how many bytes.
struct ValuePlan {
  std::vector<ValueBlock> blocks;
  std::size_t bytes = 0;  // a multiple of 8
};

/// No `count` values take fewer bytes: they do where all have the same exponent.
constexpr std::size_t packed_values_least(DType dtype, std::size_t count) {
  const std::size_t headers = kValueHeaderBytes * ((count + kValueBlock - 1) / kValueBlock);
  return (count * (size_of(dtype) - 1) + headers + 7) / 8 * 8;
}

/// What `count` values take whose exponents are as close together as those of gradients of which the largest were selected:
/// 2.1 bits each, which is what a small MLP's, a transformer layer's and those drawn from Student's t take at a density of
/// 0.8 %.
std::size_t packed_values_expected(DType dtype, std::size_t count);

/// Reads the values once, and few of them where exponents are all over the place. The plan suits these values alone.
/// CHECKs that packs_values(dtype), here and below.
ValuePlan plan_values(DType dtype, ConstBytes values);

/// Writes plan.bytes bytes, just what `out` holds (CHECKed). Of values that somebody has changed since, it is not said what.
void pack_values(DType dtype, const ValuePlan& plan, ConstBytes values, Bytes out);

/// Reads what pack_values() wrote: all of `packed`, and as many values as `values` has room for. False, and `values` are of
/// no use, where the bytes are no such thing: any are safe.
[[nodiscard]] bool unpack_values(DType dtype, ConstBytes packed, Bytes values);

namespace reference {
void pack_values(DType dtype, const ValuePlan& plan, ConstBytes values, Bytes out);
[[nodiscard]] bool unpack_values(DType dtype, ConstBytes packed, Bytes values);
}  // namespace reference

}  // namespace telegrad::kernels
