#include "kernels/reduce.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernel_samples.hpp"
#include "kernels/scale.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using samples::Guarded;

using samples::kReductions;

template <class Body>
void for_each_float(Body body) {
  body(float{});
  body(double{});
  body(f16{});
  body(bf16{});
}

template <class Body>
void for_each_type(Body body) {
  for_each_float(body);
  body(std::int32_t{});
  body(std::int64_t{});
}

template <class V>
std::vector<V> reduced(Reduction reduction, const std::vector<V>& a, const std::vector<V>& b) {
  Guarded<V> left(a), right(b), out(a.size());
  kernels::reduce_to(dtype_of<V>, reduction, left.bytes(), right.bytes(), out.bytes());
  return out.copy();
}

template <class V>
void expect_like_reference(Reduction reduction, std::size_t size, std::size_t shift, std::mt19937& random) {
  const auto a = samples::awkward_values<V>(random, size);
  const auto b = samples::awkward_values<V>(random, size);
  Guarded<V> scalar(size);
  {
    Guarded<V> left(a), right(b);
    kernels::reference::reduce_to(dtype_of<V>, reduction, left.bytes(), right.bytes(), scalar.bytes());
  }
  const auto expected = samples::bits(scalar.copy());
  samples::at_every_level([&] {
    Guarded<V> left(a, shift), right(b, shift / 2), out(size, 3 * shift % 64);
    kernels::reduce_to(dtype_of<V>, reduction, left.bytes(), right.bytes(), out.bytes());
    EXPECT_EQ(samples::bits(out.copy()), expected);
    EXPECT(out.intact() && left.intact() && right.intact());

    EXPECT_EQ(samples::bits(reduced(reduction, b, a)), expected);

    Guarded<V> accumulator(a, shift);
    kernels::reduce_to(dtype_of<V>, reduction, accumulator.bytes(), right.bytes(), accumulator.bytes());
    EXPECT_EQ(samples::bits(accumulator.copy()), expected);
    EXPECT(accumulator.intact());

    Guarded<V> addend(b, shift);
    kernels::reduce_to(dtype_of<V>, reduction, left.bytes(), addend.bytes(), addend.bytes());
    EXPECT_EQ(samples::bits(addend.copy()), expected);
    EXPECT(addend.intact());
  });
}

TEST("every reduction of every dtype has the bits of the reference, at any start, in place, and commutes") {
  std::mt19937 random(1);
  for (const std::size_t size : samples::kSizes) {
    for (const std::size_t shift : {0, 1, 2, 4, 12, 36, 63}) {
      for (const Reduction reduction : kReductions) {
        for_each_type([&]<class V>(V) { expect_like_reference<V>(reduction, size, shift, random); });
      }
    }
  }
}

TEST("add() is the sum, in place") {
  std::mt19937 random(2);
  const auto a = samples::awkward_values<float>(random, 100);
  const auto b = samples::awkward_values<float>(random, 100);
  Guarded<float> accumulator(a), addend(b);
  kernels::add(DType::f32, accumulator.bytes(), addend.bytes());
  EXPECT_EQ(samples::bits(accumulator.copy()), samples::bits(reduced(Reduction::sum, a, b)));
}

TEST("scaling has the bits of the reference at every level, size and start") {
  std::mt19937 random(3);
  for (const std::size_t size : samples::kSizes) {
    for (const std::size_t shift : {0, 2, 3, 28}) {
      for (const double factor : {0.25, 1.0 / 3.0, 0.0}) {
        for_each_float([&]<class V>(V) {
          const auto values = samples::awkward_values<V>(random, size);
          Guarded<V> expected(values);
          kernels::reference::scale(dtype_of<V>, expected.bytes(), factor);
          samples::at_every_level([&] {
            Guarded<V> scaled(values, shift);
            kernels::scale(dtype_of<V>, scaled.bytes(), factor);
            EXPECT_EQ(samples::bits(scaled.copy()), samples::bits(expected.copy()));
            EXPECT(scaled.intact());
          });
        });
      }
    }
  }
}

TEST("scaling rounds the factor to the precision that is computed in") {
  samples::at_every_level([&] {
    Guarded<double> wide(std::vector<double>(40, 7.0));
    kernels::scale(DType::f64, wide.bytes(), 1.0 / 3.0);
    for (const double value : wide.copy()) EXPECT_EQ(value, 7.0 * (1.0 / 3.0));
    Guarded<float> narrow(std::vector<float>(40, 7.0F));
    kernels::scale(DType::f32, narrow.bytes(), 1.0 / 3.0);
    for (const float value : narrow.copy()) EXPECT_EQ(value, 7.0F * (1.0F / 3.0F));
    Guarded<f16> half(std::vector<f16>(40, f16(7.0F)));
    kernels::scale(DType::f16, half.bytes(), 1.0 / 3.0);
    for (const f16 value : half.copy()) EXPECT_EQ(value.bits, f16(7.0F * (1.0F / 3.0F)).bits);
  });
}

TEST("a NaN result is the canonical one, whichever NaNs went in and wherever they stood") {
  for_each_float([]<class V>(V) {
    using Format = kernels::Format<V>;
    const V infinity = std::bit_cast<V>(Format::kInfinity);
    const V negative = std::bit_cast<V>(static_cast<typename Format::Bits>(~Format::kMagnitude | Format::kInfinity));
    const auto special = samples::special_values<V>();
    std::vector<V> a, b;
    for (std::size_t nan = special.size() - 3; nan < special.size(); ++nan) {
      for (const V other : special) {
        a.push_back(special[nan]);
        b.push_back(other);
      }
    }
    const auto expect_nan = [](const std::vector<V>& results) {
      for (const V result : results) EXPECT(std::bit_cast<typename Format::Bits>(result) == Format::kNan);
    };
    samples::at_every_level([&] {
      for (const Reduction reduction : kReductions) {
        expect_nan(reduced(reduction, a, b));
        expect_nan(reduced(reduction, b, a));
      }
      expect_nan(reduced<V>(Reduction::sum, std::vector<V>(40, infinity), std::vector<V>(40, negative)));
      expect_nan(reduced<V>(Reduction::prod, std::vector<V>(40, negative), std::vector<V>(40, V(0.0F))));
    });
  });
}

// `ascending`: by value, -0 before +0. Every pair, in both orders.
template <class V>
void expect_extremes(const std::vector<V>& ascending) {
  std::vector<V> a, b, smaller, larger;
  for (std::size_t i = 0; i < ascending.size(); ++i) {
    for (std::size_t j = 0; j < ascending.size(); ++j) {
      a.push_back(ascending[i]);
      b.push_back(ascending[j]);
      smaller.push_back(ascending[std::min(i, j)]);
      larger.push_back(ascending[std::max(i, j)]);
    }
  }
  samples::at_every_level([&] {
    EXPECT_EQ(samples::bits(reduced(Reduction::min, a, b)), samples::bits(smaller));
    EXPECT_EQ(samples::bits(reduced(Reduction::max, a, b)), samples::bits(larger));
  });
}

TEST("max_abs takes the larger magnitude with its sign, of two that differ in sign only the positive one") {
  for_each_float([]<class V>(V) {
    std::vector<V> ascending;  // by magnitude, of equal ones the negative first
    for (const V value : {V(0.0F), V(1.0F), V(2.5F), V(300.0F), std::bit_cast<V>(kernels::Format<V>::kInfinity)}) {
      using Bits = typename kernels::Format<V>::Bits;
      ascending.push_back(
          std::bit_cast<V>(static_cast<Bits>(std::bit_cast<Bits>(value) | ~kernels::Format<V>::kMagnitude)));
      ascending.push_back(value);
    }
    std::vector<V> a, b, chosen;
    for (std::size_t i = 0; i < ascending.size(); ++i) {
      for (std::size_t j = 0; j < ascending.size(); ++j) {
        a.push_back(ascending[i]);
        b.push_back(ascending[j]);
        chosen.push_back(ascending[std::max(i, j)]);
      }
    }
    samples::at_every_level(
        [&] { EXPECT_EQ(samples::bits(reduced(Reduction::max_abs, a, b)), samples::bits(chosen)); });
  });
  using Integers = std::vector<std::int32_t>;
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  EXPECT(reduced(Reduction::max_abs, Integers{3, -3, 0, kMost, -5, kLeast}, Integers{-3, 3, -1, kLeast, 4, 1}) ==
         (Integers{3, 3, -1, kLeast, -5, kLeast}));
}

TEST("min and max go by value, with -0 below +0, through subnormals to the infinities") {
  for_each_float([]<class V>(V) {
    const auto special = samples::special_values<V>();  // pairs of a magnitude and its negative, ascending
    std::vector<V> ascending;
    for (std::size_t i = 6; i-- > 0;) ascending.push_back(special[2 * i + 1]);
    for (std::size_t i = 0; i < 6; ++i) ascending.push_back(special[2 * i]);
    ascending.insert(ascending.begin() + 2, V(-1.5F));  // after -infinity and the most negative number
    ascending.insert(ascending.end() - 2, V(0.75F));
    expect_extremes(ascending);
  });
  expect_extremes<std::int32_t>({std::numeric_limits<std::int32_t>::min(), -7, -1, 0, 1, 1 << 20,
                                 std::numeric_limits<std::int32_t>::max()});
  expect_extremes<std::int64_t>({std::numeric_limits<std::int64_t>::min(), -(std::int64_t{1} << 40), -1, 0, 1,
                                 std::int64_t{1} << 33, std::numeric_limits<std::int64_t>::max()});
}

TEST("integers wrap round") {
  const auto check = []<class V>(V) {
    constexpr V kMost = std::numeric_limits<V>::max();
    constexpr V kLeast = std::numeric_limits<V>::min();
    samples::at_every_level([&] {
      EXPECT(reduced<V>(Reduction::sum, std::vector<V>(40, kMost), std::vector<V>(40, 3)) ==
             std::vector<V>(40, kLeast + 2));
      EXPECT(reduced<V>(Reduction::prod, std::vector<V>(40, kMost), std::vector<V>(40, 2)) == std::vector<V>(40, -2));
      EXPECT(reduced<V>(Reduction::prod, std::vector<V>(40, kLeast), std::vector<V>(40, -1)) ==
             std::vector<V>(40, kLeast));
      EXPECT(reduced<V>(Reduction::prod, std::vector<V>(40, -7), std::vector<V>(40, 6)) == std::vector<V>(40, -42));
    });
  };
  check(std::int32_t{});
  check(std::int64_t{});
}

// The exact result is representable in f64: `off` compares distances to it.
template <class V>
void expect_nearest(Reduction reduction, float other) {
  using Bits = typename kernels::Format<V>::Bits;
  std::vector<V> a, b;
  for (std::uint32_t i = 0; i < 1U << 16; i += 7) {
    const auto value = std::bit_cast<V>(static_cast<std::uint16_t>(i));
    if (!std::isfinite(static_cast<float>(value))) continue;
    a.push_back(value);
    b.push_back(V(other));
  }
  samples::at_every_level([&] {
    const auto results = reduced(reduction, a, b);
    for (std::size_t i = 0; i < results.size(); ++i) {
      const auto left = static_cast<double>(static_cast<float>(a[i]));
      const auto right = static_cast<double>(static_cast<float>(b[i]));
      const double exact = reduction == Reduction::sum ? left + right : left * right;
      const auto magnitude = static_cast<Bits>(results[i].bits & 0x7fffU);
      if (magnitude == 0 || magnitude + 1 >= kernels::Format<V>::kInfinity) continue;
      const auto off = [&](int steps) {
        const auto neighbour = std::bit_cast<V>(static_cast<Bits>(magnitude + steps));
        return std::abs(static_cast<double>(static_cast<float>(neighbour)) - std::abs(exact));
      };
      EXPECT(off(0) <= off(-1) && off(0) <= off(1));
      if (off(0) == off(-1) || off(0) == off(1)) EXPECT_EQ(magnitude & 1, 0);
    }
  });
}

TEST("sums and products of 16-bit floats are the exact ones rounded once to nearest even") {
  for (const float other : {1.0F, -0.3359375F, 0.001F, 3.0e38F}) {
    expect_nearest<bf16>(Reduction::sum, other);
    if (other < 1.0e38F) expect_nearest<bf16>(Reduction::prod, other);
  }
  for (const float other : {1.0F, -0.3359375F, 0.001F, 6.0e4F}) {
    expect_nearest<f16>(Reduction::sum, other);
    expect_nearest<f16>(Reduction::prod, other);
  }
}

TEST("plus -0, every f16 stays what it is, at every level") {
  std::vector<f16> all, expected;
  for (std::uint32_t i = 0; i < 1U << 16; ++i) {
    all.push_back(std::bit_cast<f16>(static_cast<std::uint16_t>(i)));
    expected.push_back(kernels::is_nan(all.back()) ? std::bit_cast<f16>(std::uint16_t{0x7e00}) : all.back());
  }
  const std::vector<f16> zeros(all.size(), std::bit_cast<f16>(std::uint16_t{0x8000}));
  samples::at_every_level([&] {
    EXPECT_EQ(samples::bits(reduced(Reduction::sum, all, zeros)), samples::bits(expected));
  });
}

// One element of integers or booleans, in arithmetic that cannot overflow.
template <class V>
V of_whole(Reduction reduction, V a, V b) {
  using Wide = unsigned __int128;
  const auto low = [](Wide wide) { return static_cast<V>(static_cast<std::uint64_t>(wide)); };
  switch (reduction) {
    case Reduction::sum: return low(static_cast<Wide>(a) + static_cast<Wide>(b));
    case Reduction::prod: return low(static_cast<Wide>(a) * static_cast<Wide>(b));
    case Reduction::min: return std::min(a, b);
    case Reduction::max: return std::max(a, b);
    case Reduction::max_abs: {
      const auto left = static_cast<__int128>(a), right = static_cast<__int128>(b);
      const auto magnitude = [](__int128 value) { return value < 0 ? -value : value; };
      if (magnitude(left) == magnitude(right)) return std::max(a, b);
      return magnitude(left) < magnitude(right) ? b : a;
    }
    case Reduction::band: return static_cast<V>(a & b);
    case Reduction::bor: return static_cast<V>(a | b);
    case Reduction::bxor: return static_cast<V>(a ^ b);
    case Reduction::land: return static_cast<V>(a && b);
    case Reduction::lor: return static_cast<V>(a || b);
    default: return static_cast<V>(!a != !b);
  }
}

template <class V, class Right>
void expect_each(DType dtype, Reduction reduction, const std::vector<V>& a, const std::vector<V>& b, std::size_t shift,
                 const Right& right) {
  std::vector<V> expected;
  for (std::size_t i = 0; i < a.size(); ++i) expected.push_back(right(a[i], b[i]));
  const auto same = [&](Guarded<V>& found) {
    return found.intact() && (a.empty() || std::memcmp(found.copy().data(), expected.data(), a.size() * sizeof(V)) == 0);
  };
  Guarded<V> first(a), second(b), one_by_one(a.size());
  kernels::reference::reduce_to(dtype, reduction, first.bytes(), second.bytes(), one_by_one.bytes());
  EXPECT(same(one_by_one));
  samples::at_every_level([&] {
    Guarded<V> left(a, shift), other(b, shift / 2), out(a.size(), 3 * shift % 64), turned(a.size());
    kernels::reduce_to(dtype, reduction, left.bytes(), other.bytes(), out.bytes());
    kernels::reduce_to(dtype, reduction, other.bytes(), left.bytes(), turned.bytes());
    kernels::reduce_to(dtype, reduction, left.bytes(), other.bytes(), left.bytes());  // in place
    EXPECT(same(out) && same(turned) && same(left) && other.intact());
  });
}

constexpr Reduction kAll[] = {Reduction::sum,  Reduction::avg,  Reduction::prod, Reduction::min,
                              Reduction::max,  Reduction::max_abs, Reduction::band, Reduction::bor,
                              Reduction::bxor, Reduction::land, Reduction::lor,  Reduction::lxor};

TEST("integers of every width have the bits of exact arithmetic, at every level, size and start") {
  std::mt19937 random(7);
  const auto check = [&]<class V>(DType dtype, V) {
    for (const std::size_t size : samples::kSizes) {
      for (const std::size_t shift : {0, 1, 12, 63}) {
        const auto a = samples::awkward_values<V>(random, size);
        const auto b = samples::awkward_values<V>(random, size);
        for (const Reduction reduction : kAll) {
          if (!has_reduction(dtype, reduction)) continue;
          expect_each(dtype, reduction, a, b, shift, [&](V x, V y) { return of_whole(reduction, x, y); });
        }
      }
    }
  };
  check(DType::i8, std::int8_t{});
  check(DType::i16, std::int16_t{});
  check(DType::i32, std::int32_t{});
  check(DType::i64, std::int64_t{});
  check(DType::u8, std::uint8_t{});
  check(DType::u16, std::uint16_t{});
  check(DType::u32, std::uint32_t{});
  check(DType::u64, std::uint64_t{});
}

TEST("booleans are or, and, exclusive or, and any byte but 0 is true") {
  std::mt19937 random(8);
  for (const std::size_t size : samples::kSizes) {
    const auto a = samples::awkward_values<std::uint8_t>(random, size);
    const auto b = samples::awkward_values<std::uint8_t>(random, size);
    for (const Reduction reduction : kAll) {
      if (!has_reduction(DType::boolean, reduction)) continue;
      expect_each(DType::boolean, reduction, a, b, size % 7, [&](std::uint8_t x, std::uint8_t y) -> std::uint8_t {
        const bool left = x != 0, right = y != 0;
        switch (reduction) {
          case Reduction::sum:
          case Reduction::max:
          case Reduction::bor:
          case Reduction::lor: return left || right;
          case Reduction::bxor:
          case Reduction::lxor: return left != right;
          default: return left && right;
        }
      });
    }
  }
}

TEST("complex numbers are added by parts and multiplied as such, a NaN part being the canonical one") {
  std::mt19937 random(9);
  const auto check = [&]<class Part>(DType dtype, Part) {
    using V = kernels::Complex<Part>;
    const auto drawn = [&](std::size_t size) {
      const auto parts = samples::awkward_values<Part>(random, 2 * size);
      std::vector<V> values;
      for (std::size_t i = 0; i < size; ++i) values.push_back({parts[2 * i], parts[2 * i + 1]});
      return values;
    };
    const auto canonical = [](Part part) {
      return std::isnan(part) ? std::bit_cast<Part>(kernels::Format<Part>::kNan) : part;
    };
    for (const std::size_t size : samples::kSizes) {
      for (const std::size_t shift : {0, 3, 8}) {
        const auto a = drawn(size), b = drawn(size);
        expect_each(dtype, Reduction::sum, a, b, shift, [&](V x, V y) {
          return V{canonical(x.real + y.real), canonical(x.imaginary + y.imaginary)};
        });
        expect_each(dtype, Reduction::prod, a, b, shift, [&](V x, V y) {
          return V{canonical(x.real * y.real - x.imaginary * y.imaginary),
                   canonical(x.real * y.imaginary + x.imaginary * y.real)};
        });
      }
    }
    Guarded<V> halves(std::vector<V>(40, {Part{3}, Part{-5}}));
    kernels::scale(dtype, halves.bytes(), 0.5);
    for (const V value : halves.copy()) EXPECT(value.real == Part{1.5} && value.imaginary == Part{-2.5});
  };
  check(DType::c64, float{});
  check(DType::c128, double{});
}

}  // namespace
