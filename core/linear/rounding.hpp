#pragma once
// Bounds of terms whose sums must not round.

#include <cmath>

namespace telegrad::linear {

// The least power of two that is not below x; 1 for 0, and where there is none.
inline double power_of_two(double x) {
  if (!(x > 0) || !std::isfinite(x)) return 1;
  int exponent = 0;
  const double part = std::frexp(x, &exponent);
  return std::ldexp(1.0, part == 0.5 ? exponent - 1 : exponent);
}

}  // namespace telegrad::linear
