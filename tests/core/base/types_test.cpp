// The 16-bit floats, every one of them, against the definition of the format.
#include "testing.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/types.hpp"

namespace {

using namespace telegrad;

f16 half(std::uint32_t bits) { return std::bit_cast<f16>(static_cast<std::uint16_t>(bits)); }

// IEEE 754-2019, 3.4: five bits of exponent with bias 15, ten of fraction.
double value_of(std::uint32_t bits) {
  const auto exponent = static_cast<int>((bits >> 10) & 0x1fU);
  const double fraction = bits & 0x3ffU;
  const double sign = bits & 0x8000U ? -1.0 : 1.0;
  if (exponent == 31) {
    return fraction == 0.0 ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024.0 + fraction, exponent - 25);
}

TEST("every f16 has the value that its bits stand for, and comes back from f32 as it was") {
  for (std::uint32_t bits = 0; bits < 1U << 16; ++bits) {
    const auto wide = static_cast<float>(half(bits));
    if (std::isnan(value_of(bits))) {
      EXPECT(std::isnan(wide));
      EXPECT_EQ(f16(wide).bits, 0x7e00U);
    } else {
      EXPECT_EQ(static_cast<double>(wide), value_of(bits));
      EXPECT_EQ(std::signbit(wide), bits >= 0x8000U);
      EXPECT_EQ(f16(wide).bits, bits);
    }
  }
}

TEST("between any two neighbouring f16, f32 is rounded to the nearer one, from the middle to the even one") {
  for (const std::uint32_t sign : {0x0000U, 0x8000U}) {
    for (std::uint32_t lower = 0; lower < 0x7c00U; ++lower) {
      // Beyond the largest number comes 2^16, were it one.
      const double upper_value = lower + 1 == 0x7c00U ? 65536.0 : value_of(lower + 1);
      const auto middle = static_cast<float>((value_of(lower) + upper_value) / 2.0);
      const auto rounded = [&](float magnitude) { return f16(sign ? -magnitude : magnitude).bits; };
      const std::uint32_t even = lower % 2 == 0 ? lower : lower + 1;
      EXPECT_EQ(rounded(middle), sign | even);
      EXPECT_EQ(rounded(std::nextafter(middle, 0.0F)), sign | lower);
      EXPECT_EQ(rounded(std::nextafter(middle, 1.0e9F)), sign | (lower + 1));
    }
    const float beyond[] = {65536.0F, 1.0e30F, std::numeric_limits<float>::max(), HUGE_VALF};
    for (const float magnitude : beyond) EXPECT_EQ(f16(sign ? -magnitude : magnitude).bits, sign | 0x7c00U);
    EXPECT_EQ(f16(std::bit_cast<float>(sign << 16 | 1U)).bits, sign);  // f32's smallest
  }
}

TEST("every NaN becomes the one NaN of each 16-bit float") {
  for (const std::uint32_t word : {0x7f800001U, 0x7fc00000U, 0x7fffffffU, 0xff800001U, 0xffc00123U, 0xffffffffU}) {
    EXPECT_EQ(f16(std::bit_cast<float>(word)).bits, 0x7e00U);
    EXPECT_EQ(bf16(std::bit_cast<float>(word)).bits, 0x7fc0U);
  }
}

}  // namespace
