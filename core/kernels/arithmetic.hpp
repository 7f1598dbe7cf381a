#pragma once
// Arithmetic on one element, as every kernel does it: a NaN result is always the one quiet NaN, so that
// a + b and b + a have the same bits, also where both are NaN.

#include <bit>
#include <cstdint>

#include "base/types.hpp"

namespace telegrad::kernels {

inline constexpr std::uint32_t kQuietNan = 0x7fc00000U;
inline constexpr std::uint32_t kMagnitudeMask = 0x7fffffffU;

inline float canonical(float value) { return value == value ? value : std::bit_cast<float>(kQuietNan); }

inline float plus(float a, float b) { return canonical(a + b); }
inline bf16 plus(bf16 a, bf16 b) { return bf16(static_cast<float>(a) + static_cast<float>(b)); }

inline float times(float value, float factor) { return canonical(value * factor); }
inline bf16 times(bf16 value, float factor) { return bf16(static_cast<float>(value) * factor); }

/// The bits of |value|: they order like the magnitudes themselves, with every NaN above infinity.
inline std::uint32_t magnitude_bits(float value) { return std::bit_cast<std::uint32_t>(value) & kMagnitudeMask; }

/// x + kNeutral<V> has the bits of x for every x but NaN. (+0 would turn -0 into +0.)
template <class V>
inline constexpr V kNeutral{};
template <>
inline constexpr float kNeutral<float> = -0.0F;
template <>
inline constexpr bf16 kNeutral<bf16> = std::bit_cast<bf16>(std::uint16_t{0x8000});

}  // namespace telegrad::kernels
