#include "kernels/average.hpp"

#include <cmath>

#include "kernel_samples.hpp"
#include "kernels/reduce.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using samples::Guarded;

struct Factors {
  float a = 1.0F;
  float b = 1.0F;
  float sum = 1.0F;
};
constexpr Factors kFactors[] = {{}, {0.5F, 0.5F}, {1.0F, 0.25F}, {4.0F, 1.0F, 0.2F}, {64.0F, 64.0F, 1.0F / 127.0F}};

template <class Body>
void for_each_narrow(Body body) {
  body(f16{});
  body(bf16{});
}

template <class V>
std::vector<V> added(const std::vector<V>& a, const std::vector<V>& b, Factors factors) {
  Guarded<V> left(a), right(b), out(a.size());
  kernels::add_scaled(dtype_of<V>, {left.bytes(), factors.a}, {right.bytes(), factors.b}, factors.sum, out.bytes());
  return out.copy();
}

TEST("scaled sums have the bits of the reference at every level, size and start, in place, and commute") {
  std::mt19937 random(1);
  for (const std::size_t size : samples::kSizes) {
    for (const std::size_t shift : {0, 2, 3, 28}) {
      for (const Factors& factors : kFactors) {
        for_each_narrow([&]<class V>(V) {
          const auto a = samples::awkward_values<V>(random, size);
          const auto b = samples::awkward_values<V>(random, size);
          Guarded<V> scalar(size), left(a), right(b);
          kernels::reference::add_scaled(dtype_of<V>, {left.bytes(), factors.a}, {right.bytes(), factors.b}, factors.sum,
                                         scalar.bytes());
          const auto expected = samples::bits(scalar.copy());
          samples::at_every_level([&] {
            Guarded<V> x(a, shift), y(b, shift / 2), out(size, 3 * shift % 64);
            kernels::add_scaled(dtype_of<V>, {x.bytes(), factors.a}, {y.bytes(), factors.b}, factors.sum, out.bytes());
            EXPECT_EQ(samples::bits(out.copy()), expected);
            EXPECT(out.intact() && x.intact() && y.intact());
            EXPECT_EQ(samples::bits(added(b, a, {factors.b, factors.a, factors.sum})), expected);
            kernels::add_scaled(dtype_of<V>, {x.bytes(), factors.a}, {y.bytes(), factors.b}, factors.sum, x.bytes());
            EXPECT_EQ(samples::bits(x.copy()), expected);
            Guarded<V> fresh(a);
            kernels::add_scaled(dtype_of<V>, {fresh.bytes(), factors.a}, {y.bytes(), factors.b}, factors.sum, y.bytes());
            EXPECT_EQ(samples::bits(y.copy()), expected);
            EXPECT(x.intact() && y.intact());
          });
        });
      }
    }
  }
}

TEST("without factors it is the sum, but that finite f16 stay finite") {
  std::mt19937 random(2);
  for_each_narrow([&]<class V>(V) {
    const auto a = samples::awkward_values<V>(random, 4099);
    const auto b = samples::awkward_values<V>(random, 4099);
    Guarded<V> left(a), right(b), out(a.size());
    kernels::reduce_to(dtype_of<V>, Reduction::sum, left.bytes(), right.bytes(), out.bytes());
    auto sums = out.copy();
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const bool finite = std::isfinite(static_cast<float>(a[i])) && std::isfinite(static_cast<float>(b[i]));
      if (std::is_same_v<V, f16> && finite && std::isinf(static_cast<float>(sums[i]))) {
        sums[i] = V(std::copysign(65504.0F, static_cast<float>(sums[i])));
      }
    }
    EXPECT_EQ(samples::bits(added(a, b, {})), samples::bits(sums));
  });
}

TEST("f16 that are finite give a finite result, infinities an infinite one, opposite ones NaN") {
  constexpr float kLargest = 65504.0F;
  const std::vector<f16> a(33, f16(kLargest)), minus(33, f16(-kLargest));
  const std::vector<f16> infinite(33, f16(HUGE_VALF)), negative(33, f16(-HUGE_VALF));
  samples::at_every_level([&] {
    for (const f16 value : added(a, a, {})) EXPECT_EQ(static_cast<float>(value), kLargest);
    for (const f16 value : added(minus, minus, {4.0F, 2.0F, 0.5F})) EXPECT_EQ(static_cast<float>(value), -kLargest);
    for (const f16 value : added(a, a, {0.5F, 0.5F})) EXPECT_EQ(static_cast<float>(value), kLargest);
    for (const f16 value : added(a, infinite, {0.5F, 0.5F})) EXPECT_EQ(static_cast<float>(value), HUGE_VALF);
    for (const f16 value : added(negative, a, {0.5F, 0.25F})) EXPECT_EQ(static_cast<float>(value), -HUGE_VALF);
    for (const f16 value : added(infinite, negative, {})) EXPECT(value.bits == kernels::Format<f16>::kNan);
  });
}

TEST("what is added is rounded once: the factors are exact") {
  samples::at_every_level([] {
    // 2049 and 257 lie between two neighbours, their thirds do not.
    for (const f16 value : added(std::vector<f16>(40, f16(1024.0F)), std::vector<f16>(40, f16(1.0F)), {2.0F, 1.0F, 1.0F / 3.0F})) {
      EXPECT_EQ(static_cast<float>(value), 683.0F);
    }
    for (const bf16 value : added(std::vector<bf16>(40, bf16(128.0F)), std::vector<bf16>(40, bf16(5.0F)), {2.0F, 1.0F, 1.0F / 3.0F})) {
      EXPECT_EQ(static_cast<float>(value), 87.0F);
    }
  });
}

}  // namespace
