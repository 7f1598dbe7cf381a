#pragma once
// Decimal numbers of text as f32, correctly rounded. The text must be terminated by something that is no part of a number.

#include <array>
#include <bit>
#include <charconv>
#include <cstdint>
#include <limits>

namespace telegrad::linear {

enum class Decimal : std::uint8_t { read, malformed, too_large };

namespace detail {

inline constexpr std::array<double, 23> kPowersOfTen = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                                        1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                                        1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

inline unsigned digit_of(char c) { return static_cast<unsigned>(static_cast<unsigned char>(c)) - '0'; }

/// mantissa · 10^exponent if that takes one rounding to f64 and a harmless one to f32, else false.
inline bool exact_enough(std::uint64_t mantissa, int exponent, float& value) {
  if (mantissa >> 53 != 0 || exponent < -22 || exponent > 22) return false;
  const auto whole = static_cast<double>(mantissa);
  const double scaled = exponent < 0 ? whole / kPowersOfTen[static_cast<std::size_t>(-exponent)]
                                     : whole * kPowersOfTen[static_cast<std::size_t>(exponent)];
  // An f64 in the middle between two f32 may have been rounded to there: only from elsewhere is the second one right.
  const bool in_the_middle = (std::bit_cast<std::uint64_t>(scaled) & 0x1fffffffU) == 0x10000000U;
  const bool normal = scaled >= 0x1p-126 && scaled < 0x1.fffffep127;
  if (in_the_middle || (!normal && mantissa != 0)) return false;
  value = static_cast<float>(scaled);
  return true;
}

/// p, where the digits at `at`, without their exponent, make a number in [10^(p-1), 10^p). They are not all 0.
inline std::int64_t leading_power(const char* at) {
  while (*at == '0') ++at;
  const char* const first = at;
  while (digit_of(*at) <= 9) ++at;
  if (at != first) return at - first;
  const char* const fraction = ++at;
  while (*at == '0') ++at;
  return fraction - at;
}

}  // namespace detail

/// Reads [+-]digits[.digits][e[+-]digits], with a digit before or after the point, and moves `at` behind it. What is too
/// small becomes 0 of its sign. NaN and infinities are malformed.
inline Decimal read_decimal(const char*& at, float& value) {
  using detail::digit_of;
  const char* next = at;
  const bool negative = *next == '-';
  if (negative || *next == '+') ++next;
  const char* const first = next;
  std::uint64_t mantissa = 0;
  for (unsigned digit = digit_of(*next); digit <= 9; digit = digit_of(*++next)) mantissa = mantissa * 10 + digit;
  auto digits = next - first;
  std::int64_t fraction_digits = 0;
  if (*next == '.') {
    const char* const fraction = ++next;
    for (unsigned digit = digit_of(*next); digit <= 9; digit = digit_of(*++next)) mantissa = mantissa * 10 + digit;
    fraction_digits = next - fraction;
    digits += fraction_digits;
  }
  if (digits == 0) return Decimal::malformed;
  int exponent = 0;
  if (*next == 'e' || *next == 'E') {
    ++next;
    const bool down = *next == '-';
    if (down || *next == '+') ++next;
    if (digit_of(*next) > 9) return Decimal::malformed;
    constexpr int kLargest = 100'000;
    for (unsigned digit = digit_of(*next); digit <= 9; digit = digit_of(*++next)) {
      if (exponent < kLargest) exponent = exponent * 10 + static_cast<int>(digit);
    }
    if (down) exponent = -exponent;
  }
  at = next;
  float magnitude = 0;
  const bool fits = digits <= 19;  // in 64 bits, whatever they are
  if (!fits || !detail::exact_enough(mantissa, exponent - static_cast<int>(fraction_digits), magnitude)) {
    const auto read = std::from_chars(first, next, magnitude);
    if (read.ec == std::errc::result_out_of_range) {
      if (detail::leading_power(first) + exponent > 0) return Decimal::too_large;
      magnitude = 0;
    } else if (magnitude > std::numeric_limits<float>::max()) {
      return Decimal::too_large;
    }
  }
  value = negative ? -magnitude : magnitude;
  return Decimal::read;
}

}  // namespace telegrad::linear
