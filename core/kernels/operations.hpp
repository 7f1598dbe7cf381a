#pragma once
// The reductions as functions of two elements, and what an absent element counts as in each. All are commutative to the
// bit; a NaN result is the one quiet NaN.

#include <bit>
#include <type_traits>

#include "base/check.hpp"
#include "base/types.hpp"
#include "kernels/arithmetic.hpp"

namespace telegrad::kernels {

// kNeutral: of(x, kNeutral<V>) has the bits of x for every x but NaN.

struct Sum {
  template <class V>
  static V of(V a, V b) {
    return plus(a, b);
  }
  template <class V>
  static constexpr V kNeutral = negative_zero<V>();  // +0 would turn -0 into +0
};
struct Product {
  template <class V>
  static V of(V a, V b) {
    return times(a, b);
  }
  template <class V>
  static constexpr V kNeutral = std::bit_cast<V>(Format<V>::kOne);
};
struct Minimum {
  template <class V>
  static V of(V a, V b) {
    return smaller(a, b);
  }
  template <class V>
  static constexpr V kNeutral = std::bit_cast<V>(Format<V>::kInfinity);
};
struct Maximum {
  template <class V>
  static V of(V a, V b) {
    return larger(a, b);
  }
  template <class V>
  static constexpr V kNeutral = negative_infinity<V>();
};
struct MaximumMagnitude {
  template <class V>
  static V of(V a, V b) {
    return larger_magnitude(a, b);
  }
  template <class V>
  static constexpr V kNeutral = negative_zero<V>();  // of zeros, the positive one is taken
};

struct BitwiseAnd {
  template <class V>
  static V of(V a, V b) {
    return static_cast<V>(a & b);
  }
};
struct BitwiseOr {
  template <class V>
  static V of(V a, V b) {
    return static_cast<V>(a | b);
  }
};
struct BitwiseXor {
  template <class V>
  static V of(V a, V b) {
    return static_cast<V>(a ^ b);
  }
};
struct LogicalAnd {
  template <class V>
  static V of(V a, V b) {
    return static_cast<V>((a != 0) & (b != 0));
  }
};
struct LogicalOr {
  template <class V>
  static V of(V a, V b) {
    return static_cast<V>((a | b) != 0);
  }
};
struct LogicalXor {
  template <class V>
  static V of(V a, V b) {
    return static_cast<V>((a != 0) != (b != 0));
  }
};

/// Calls body(Sum{}) or another operation's; an average is a sum. CHECKs that it is one of numbers:
/// neither bitwise nor logical.
template <class Body>
auto on_operation(Reduction reduction, const Body& body) {
  switch (reduction) {
    case Reduction::none: break;
    case Reduction::sum:
    case Reduction::avg: return body(Sum{});
    case Reduction::prod: return body(Product{});
    case Reduction::min: return body(Minimum{});
    case Reduction::max: return body(Maximum{});
    case Reduction::max_abs: return body(MaximumMagnitude{});
    case Reduction::band:
    case Reduction::bor:
    case Reduction::bxor:
    case Reduction::land:
    case Reduction::lor:
    case Reduction::lxor: break;
  }
  check_failed("there is a reduction of numbers", __FILE__, __LINE__);
}

/// What stands in a dense vector where nobody has an entry: the reduction's neutral element, of two zeros the positive
/// one. 0 for sum, average and max_abs, 1 for prod, infinity for min, -infinity for max.
template <class V>
V absent_element(Reduction reduction) {
  return on_operation(reduction, []<class Combine>(Combine) {
    constexpr V neutral = Combine::template kNeutral<V>;
    return std::bit_cast<typename Format<V>::Bits>(neutral) ==
                   std::bit_cast<typename Format<V>::Bits>(negative_zero<V>())
               ? std::bit_cast<V>(typename Format<V>::Bits{0})
               : neutral;
  });
}

}  // namespace telegrad::kernels
