#pragma once
// Element-wise reductions of two dense vectors, at memory speed. Nothing here knows of ranks.
//
// Bytes hold whole elements of f32, f64, f16, bf16, i32 or i64, at any alignment; lengths must agree (both CHECKed).
// a ∘ b and b ∘ a have equal bits: a NaN result is canonical, also of min and max, for which -0 is below +0. 16-bit
// floats are computed in f32 and rounded once, to nearest even. Integers wrap round.

#include "base/types.hpp"

namespace telegrad::kernels {

/// out[i] = a[i] ∘ b[i]; the sum for an average. `out` may be `a` or `b`, but must not overlap them otherwise.
void reduce_to(DType dtype, Reduction reduction, ConstBytes a, ConstBytes b, Bytes out);

/// accumulator[i] += addend[i]
void add(DType dtype, Bytes accumulator, ConstBytes addend);

namespace reference {
void reduce_to(DType dtype, Reduction reduction, ConstBytes a, ConstBytes b, Bytes out);
}  // namespace reference

}  // namespace telegrad::kernels
