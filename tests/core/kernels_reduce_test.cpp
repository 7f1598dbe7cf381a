#include "kernels/reduce.hpp"

#include <cmath>
#include <limits>

#include "kernel_samples.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using samples::Guarded;

template <class V>
void expect_sums_like_reference(std::size_t size, std::size_t shift, std::mt19937& random) {
  const auto a = samples::awkward_values<V>(random, size);
  const auto b = samples::awkward_values<V>(random, size);
  Guarded<V> expected(size);
  {
    Guarded<V> left(a), right(b);
    kernels::reference::add_to(dtype_of<V>, left.bytes(), right.bytes(), expected.bytes());
  }
  samples::at_every_level([&] {
    Guarded<V> left(a, shift), right(b, shift / 2), out(size, 3 * shift % 64);
    kernels::add_to(dtype_of<V>, left.bytes(), right.bytes(), out.bytes());
    EXPECT_EQ(samples::bits(out.copy()), samples::bits(expected.copy()));
    EXPECT(out.intact() && left.intact() && right.intact());

    Guarded<V> swapped(size);
    kernels::add_to(dtype_of<V>, right.bytes(), left.bytes(), swapped.bytes());
    EXPECT_EQ(samples::bits(swapped.copy()), samples::bits(expected.copy()));

    Guarded<V> accumulator(a, shift);
    kernels::add(dtype_of<V>, accumulator.bytes(), right.bytes());
    EXPECT_EQ(samples::bits(accumulator.copy()), samples::bits(expected.copy()));
    EXPECT(accumulator.intact());

    Guarded<V> addend(b, shift);
    kernels::add_to(dtype_of<V>, left.bytes(), addend.bytes(), addend.bytes());
    EXPECT_EQ(samples::bits(addend.copy()), samples::bits(expected.copy()));
  });
}

TEST("sums have the bits of the reference at every level, size and start, in place too, and commute") {
  std::mt19937 random(1);
  for (const std::size_t size : samples::kSizes) {
    for (const std::size_t shift : {0, 1, 2, 4, 12, 36, 63}) {
      expect_sums_like_reference<float>(size, shift, random);
      expect_sums_like_reference<bf16>(size, shift, random);
    }
  }
}

TEST("scaling has the bits of the reference at every level, size and start") {
  std::mt19937 random(2);
  const auto check = [&]<class V>(V, std::size_t size, std::size_t shift, float factor) {
    const auto values = samples::awkward_values<V>(random, size);
    Guarded<V> expected(values);
    kernels::reference::scale(dtype_of<V>, expected.bytes(), factor);
    samples::at_every_level([&] {
      Guarded<V> scaled(values, shift);
      kernels::scale(dtype_of<V>, scaled.bytes(), factor);
      EXPECT_EQ(samples::bits(scaled.copy()), samples::bits(expected.copy()));
      EXPECT(scaled.intact());
    });
  };
  for (const std::size_t size : samples::kSizes) {
    for (const std::size_t shift : {0, 2, 3, 28}) {
      for (const float factor : {0.25F, 1.0F / 3.0F, 0.0F}) {
        check(float{}, size, shift, factor);
        check(bf16{}, size, shift, factor);
      }
    }
  }
}

TEST("a NaN sum is the canonical one, whichever NaNs went in") {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> a{std::bit_cast<float>(0xffc00123U), std::bit_cast<float>(0x7fa00001U), infinity, 1.0F};
  const std::vector<float> b{std::bit_cast<float>(0x7fc00456U), 1.0F, -infinity, std::bit_cast<float>(0xffffffffU)};
  samples::at_every_level([&] {
    Guarded<float> left(a), right(b);
    kernels::add(DType::f32, left.bytes(), right.bytes());
    for (const std::uint32_t word : samples::bits(left.copy())) EXPECT_EQ(word, 0x7fc00000U);
  });
}

TEST("a bf16 sum is the exact sum rounded once to nearest even") {
  std::vector<bf16> a, b;
  for (std::uint32_t i = 0; i < 1U << 16; i += 7) {
    for (const float other : {1.0F, -0.3359375F, 3.0e38F}) {
      const auto value = std::bit_cast<bf16>(static_cast<std::uint16_t>(i));
      if (!std::isfinite(static_cast<float>(value))) continue;
      a.push_back(value);
      b.push_back(bf16(other));
    }
  }
  samples::at_every_level([&] {
    Guarded<bf16> left(a), right(b);
    kernels::add(DType::bf16, left.bytes(), right.bytes());
    const auto sums = left.copy();
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const float exact = static_cast<float>(a[i]) + static_cast<float>(b[i]);
      const auto word = std::bit_cast<std::uint32_t>(exact);
      const auto below = std::bit_cast<float>(word & 0xffff0000U);
      const auto above = std::bit_cast<float>((word & 0xffff0000U) + 0x10000U);
      const float sum = static_cast<float>(sums[i]);
      if (!std::isfinite(above)) continue;
      const float off = std::abs(sum - exact);
      EXPECT(off <= std::abs(below - exact) && off <= std::abs(above - exact));
      if (std::abs(below - exact) == std::abs(above - exact)) EXPECT_EQ(sums[i].bits & 1U, 0U);
    }
  });
}

}  // namespace
