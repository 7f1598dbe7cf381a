#pragma once
// The vocabulary of every room: ranks, steps, element types, reductions.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace telegrad {

using Rank = std::uint32_t;
using Step = std::uint32_t;
using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

inline constexpr Rank kNoRank = ~Rank{0};

/// A bfloat16 as it lies in memory; arithmetic happens in f32.
struct bf16 {
  std::uint16_t bits = 0;

  bf16() = default;
  explicit bf16(float value) : bits(round(value)) {}
  explicit operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
  friend bool operator==(bf16, bf16) = default;

 private:
  // Round to nearest even. Every NaN becomes the one quiet NaN, so that bits agree across ranks.
  static std::uint16_t round(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    if ((word & 0x7fffffffU) > 0x7f800000U) return 0x7fc0U;
    return static_cast<std::uint16_t>((word + 0x7fffU + ((word >> 16) & 1U)) >> 16);
  }
};

/// An IEEE 754 half as it lies in memory; arithmetic happens in f32.
struct f16 {
  std::uint16_t bits = 0;

  f16() = default;
  explicit f16(float value) : bits(round(value)) {}
  explicit operator float() const {
    const std::uint32_t magnitude = bits & 0x7fffU;
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
    const std::uint32_t exponent = magnitude < 0x7c00U ? 127 - 15 : 255 - 31;  // moves to f32's; infinity to infinity
    const auto subnormal = std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<int>(magnitude)) * 0x1p-24F);
    const std::uint32_t normal = (magnitude << 13) + (exponent << 23);
    return std::bit_cast<float>(sign | (magnitude < 0x0400U ? subnormal : normal));
  }
  friend bool operator==(f16, f16) = default;

 private:
  // Round to nearest even. Every NaN becomes the one quiet NaN, so that bits agree across ranks.
  static std::uint16_t round(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = word & 0x7fffffffU;
    // The unit in the last place of 0.5 is the smallest subnormal: the addition rounds to a multiple of it.
    constexpr std::uint32_t kHalf = 0x3f000000U;
    const auto subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - kHalf;
    const std::uint32_t normal = (magnitude - ((127U - 15U) << 23) + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
    const std::uint32_t finite = magnitude < 0x38800000U ? subnormal : normal;  // 2^-14: the smallest normal number
    const std::uint32_t rounded = magnitude < 0x47800000U ? finite : 0x7c00U;   // 2^16: beyond all that rounds down
    return static_cast<std::uint16_t>(magnitude > 0x7f800000U ? 0x7e00U : ((word >> 16) & 0x8000U) | rounded);
  }
};

// Values are part of the wire format: append, never renumber.
enum class DType : std::uint8_t {
  f32 = 1,
  bf16 = 2,
  u8 = 3,  // also bytes of a type that is not listed
  f64 = 4,
  f16 = 5,
  i8 = 6,
  i16 = 7,
  i32 = 8,
  i64 = 9,
  u16 = 10,
  u32 = 11,
  u64 = 12,
  boolean = 13,
  c64 = 14,
  c128 = 15,
};
/// max_abs: the element of the larger magnitude with its sign; of two that differ in sign only, the positive one.
/// land, lor and lxor take every element but 0 for true, and give 0 or 1.
enum class Reduction : std::uint8_t {
  none = 0,
  sum = 1,
  avg = 2,
  prod = 3,
  min = 4,
  max = 5,
  max_abs = 6,
  band = 7,
  bor = 8,
  bxor = 9,
  land = 10,
  lor = 11,
  lxor = 12,
};
inline constexpr Reduction kLastReduction = Reduction::lxor;

// How f32 values travel where fewer bytes are asked for than they have; see codec/encode_values.hpp.
enum class ValueEncoding : std::uint8_t {
  native = 0,
  bf16 = 1,
  f16 = 2,
  int8 = 3,
  qsgd8 = 4,
  qsgd4 = 5,
  qsgd2 = 6,
  mean = 7,
  e3m0 = 8,
  codebook2 = 9,
};
inline constexpr ValueEncoding kLastValueEncoding = ValueEncoding::codebook2;

template <class T>
inline constexpr DType dtype_of = DType::u8;
template <>
inline constexpr DType dtype_of<float> = DType::f32;
template <>
inline constexpr DType dtype_of<bf16> = DType::bf16;
template <>
inline constexpr DType dtype_of<f16> = DType::f16;
template <>
inline constexpr DType dtype_of<double> = DType::f64;
template <>
inline constexpr DType dtype_of<std::int32_t> = DType::i32;
template <>
inline constexpr DType dtype_of<std::int64_t> = DType::i64;

constexpr bool is_integer(DType dtype) {
  return (dtype >= DType::i8 && dtype <= DType::u64) || dtype == DType::u8;
}
constexpr bool is_unsigned(DType dtype) {
  return (dtype >= DType::u16 && dtype <= DType::u64) || dtype == DType::u8;
}
constexpr bool is_complex(DType dtype) { return dtype == DType::c64 || dtype == DType::c128; }

/// Whether dense elements of this type have this reduction: all have sum and prod. Floats and complex numbers have avg,
/// all but complex numbers min and max, signed ones max_abs, integers and booleans the bitwise and logical ones.
constexpr bool has_reduction(DType dtype, Reduction reduction) {
  const bool is_whole = is_integer(dtype) || dtype == DType::boolean;
  switch (reduction) {
    case Reduction::none: return false;
    case Reduction::sum:
    case Reduction::prod: return true;
    case Reduction::avg: return !is_whole;
    case Reduction::min:
    case Reduction::max: return !is_complex(dtype);
    case Reduction::max_abs: return !is_complex(dtype) && !is_unsigned(dtype) && dtype != DType::boolean;
    case Reduction::band:
    case Reduction::bor:
    case Reduction::bxor:
    case Reduction::land:
    case Reduction::lor:
    case Reduction::lxor: return is_whole;
  }
  return false;
}
/// Whether the result holds 0 and 1 alone.
constexpr bool gives_truth(DType dtype, Reduction reduction) {
  return dtype == DType::boolean || reduction == Reduction::land || reduction == Reduction::lor ||
         reduction == Reduction::lxor;
}

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::u8:
    case DType::i8:
    case DType::boolean: return 1;
    case DType::bf16:
    case DType::f16:
    case DType::i16:
    case DType::u16: return 2;
    case DType::f32:
    case DType::i32:
    case DType::u32: return 4;
    case DType::f64:
    case DType::i64:
    case DType::u64:
    case DType::c64: return 8;
    case DType::c128: return 16;
  }
  return 1;
}

}  // namespace telegrad
