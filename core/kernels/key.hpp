#pragma once
// The order in which selection ranks entries. An entry's key is a signed integer: the bits of |x|, or, where only one
// sign may be sent (RedSync, same-sign quantisation), those of x or of −x, below 1 where x is not of that sign.
//
// By its bits a NaN is larger than infinity: it is selected and cleared, rather than hiding in a residual for ever.

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/arithmetic.hpp"

namespace telegrad::kernels {

/// Which entries may be selected.
enum class Side : std::uint8_t { both, positive, negative };

inline constexpr std::int32_t kHighestKey = 0x7fffffff;

/// The lowest key that may be selected: zeros are of neither sign.
constexpr std::int32_t lowest_key(Side side) { return side == Side::both ? 0 : 1; }

/// (bits of x ^ flip) & mask is the key: one instruction of AVX-512.
struct KeyBits {
  std::uint32_t flip;
  std::uint32_t mask;

  constexpr explicit KeyBits(Side side)
      : flip(side == Side::negative ? ~kMagnitudeMask : 0U), mask(side == Side::both ? kMagnitudeMask : ~0U) {}

  constexpr std::int32_t operator()(float x) const {
    return static_cast<std::int32_t>((std::bit_cast<std::uint32_t>(x) ^ flip) & mask);
  }
};

/// The key at which `threshold` selects. A threshold <= 0 selects all of the side.
constexpr std::int32_t key_of_threshold(float threshold, Side side) {
  // By bits: where denormals count as zero, one compared with 0 would select everything.
  return std::max(lowest_key(side), std::bit_cast<std::int32_t>(threshold));
}

}  // namespace telegrad::kernels
