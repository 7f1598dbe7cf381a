#pragma once
// Arithmetic on one element, as every kernel does it: a NaN result is always the one quiet NaN, so that
// a ∘ b and b ∘ a have the same bits, also where both are NaN. 16-bit floats are computed in f32 and rounded once;
// integers wrap round.

#include <bit>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/types.hpp"

namespace telegrad::kernels {

inline constexpr std::uint32_t kMagnitudeMask = 0x7fffffffU;

/// How a float lies in memory: sign, then the magnitude, with every NaN above infinity.
template <class V>
struct Format;
template <>
struct Format<float> {
  using Bits = std::int32_t;
  static constexpr Bits kInfinity = 0x7f800000, kNan = 0x7fc00000, kMagnitude = 0x7fffffff, kOne = 0x3f800000;
};
template <>
struct Format<double> {
  using Bits = std::int64_t;
  static constexpr Bits kInfinity = 0x7ff0000000000000, kNan = 0x7ff8000000000000, kMagnitude = 0x7fffffffffffffff,
                        kOne = 0x3ff0000000000000;
};
template <>
struct Format<bf16> {
  using Bits = std::int16_t;
  static constexpr Bits kInfinity = 0x7f80, kNan = 0x7fc0, kMagnitude = 0x7fff, kOne = 0x3f80;
};
template <>
struct Format<f16> {
  using Bits = std::int16_t;
  static constexpr Bits kInfinity = 0x7c00, kNan = 0x7e00, kMagnitude = 0x7fff, kOne = 0x3c00;
};
// Integers have no sign bit, and in place of infinity their largest.
template <std::signed_integral V>
struct Format<V> {
  using Bits = V;
  static constexpr Bits kInfinity = std::numeric_limits<V>::max(), kMagnitude = -1, kOne = 1;
};

template <class V>
concept NarrowFloat = std::same_as<V, bf16> || std::same_as<V, f16>;

template <std::floating_point V>
V canonical(V value) {
  return value == value ? value : std::bit_cast<V>(Format<V>::kNan);
}

template <std::floating_point V>
V plus(V a, V b) {
  return canonical(a + b);
}
template <NarrowFloat V>
V plus(V a, V b) {
  return V(static_cast<float>(a) + static_cast<float>(b));
}
template <std::integral V>
V plus(V a, V b) {
  using Wrapping = std::make_unsigned_t<V>;
  return static_cast<V>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b));
}

/// The precision in which a value is multiplied by a factor, which of integers is 1.
template <class V>
using Factor = std::conditional_t<std::same_as<V, double> || std::integral<V>, V, float>;

/// value * factor. The factor is rounded to the precision that is computed in.
template <std::floating_point V>
V times(V value, V factor) {
  return canonical(value * factor);
}
template <NarrowFloat V>
V times(V value, float factor) {
  return V(static_cast<float>(value) * factor);
}
template <NarrowFloat V>
V times(V value, V factor) {
  return times(value, static_cast<float>(factor));
}
template <std::integral V>
V times(V a, V b) {
  using Wrapping = std::common_type_t<std::make_unsigned_t<V>, unsigned>;  // an int would not wrap
  return static_cast<V>(static_cast<Wrapping>(a) * static_cast<Wrapping>(b));
}

/// A complex number as it lies in memory.
template <std::floating_point Part>
struct Complex {
  Part real;
  Part imaginary;
};
template <std::floating_point Part>
Complex<Part> times(Complex<Part> a, Complex<Part> b) {
  return {canonical(a.real * b.real - a.imaginary * b.imaginary), canonical(a.real * b.imaginary + a.imaginary * b.real)};
}

/// Bits that order as integers like the floats themselves, -0 below +0.
template <class V>
typename Format<V>::Bits ordered_bits(V value) {
  using Bits = typename Format<V>::Bits;
  const auto bits = std::bit_cast<Bits>(value);
  return static_cast<Bits>(bits < 0 ? bits ^ Format<V>::kMagnitude : bits);
}
template <class V>
bool is_nan(V value) {
  return (std::bit_cast<typename Format<V>::Bits>(value) & Format<V>::kMagnitude) > Format<V>::kInfinity;
}
template <class V>
bool is_zero(V value) {
  return (std::bit_cast<typename Format<V>::Bits>(value) & Format<V>::kMagnitude) == 0;
}

/// The smaller one; NaN if either is.
template <class V>
V smaller(V a, V b) {
  const V chosen = ordered_bits(a) < ordered_bits(b) ? a : b;
  return is_nan(a) || is_nan(b) ? std::bit_cast<V>(Format<V>::kNan) : chosen;
}
template <std::integral V>
V smaller(V a, V b) {
  return a < b ? a : b;
}
/// The larger one; NaN if either is.
template <class V>
V larger(V a, V b) {
  const V chosen = ordered_bits(a) < ordered_bits(b) ? b : a;
  return is_nan(a) || is_nan(b) ? std::bit_cast<V>(Format<V>::kNan) : chosen;
}
template <std::integral V>
V larger(V a, V b) {
  return a < b ? b : a;
}

/// The one of the larger magnitude, of two that differ in sign only the positive one; NaN if either is.
template <class V>
V larger_magnitude(V a, V b) {
  using Word = std::make_unsigned_t<typename Format<V>::Bits>;
  // The magnitude, and below it whether the sign is plus. NaNs lie above all others.
  const auto rank = [](V value) { return static_cast<Word>(std::rotl(std::bit_cast<Word>(value), 1) ^ Word{1}); };
  const V chosen = rank(a) < rank(b) ? b : a;
  return is_nan(chosen) ? std::bit_cast<V>(Format<V>::kNan) : chosen;
}
template <std::signed_integral V>
V larger_magnitude(V a, V b) {
  using Word = std::make_unsigned_t<V>;
  const auto magnitude = [](V value) { return static_cast<Word>(value < 0 ? Word{0} - static_cast<Word>(value) : static_cast<Word>(value)); };
  if (magnitude(a) == magnitude(b)) return larger(a, b);
  return magnitude(a) < magnitude(b) ? b : a;
}

template <class V>
constexpr V negative_zero() {
  return std::bit_cast<V>(static_cast<typename Format<V>::Bits>(~Format<V>::kMagnitude));
}
template <class V>
constexpr V negative_infinity() {
  if constexpr (std::integral<V>) return std::numeric_limits<V>::min();
  return std::bit_cast<V>(static_cast<typename Format<V>::Bits>(~Format<V>::kMagnitude | Format<V>::kInfinity));
}

/// The bits of |value|: they order like the magnitudes themselves, with every NaN above infinity.
inline std::uint32_t magnitude_bits(float value) { return std::bit_cast<std::uint32_t>(value) & kMagnitudeMask; }

}  // namespace telegrad::kernels
