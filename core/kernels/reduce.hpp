#pragma once
// Element-wise reductions of two dense vectors, at memory speed. Nothing here knows of ranks.
//
// Bytes hold whole elements, at any alignment; lengths must agree, and the dtype must have the reduction (all CHECKed).
// a ∘ b and b ∘ a have equal bits: a NaN result is canonical, also of min and max, for which -0 is below +0. 16-bit
// floats are computed in f32 and rounded once, to nearest even. Integers wrap round. Of booleans sum and max are or, prod
// and min are and; any byte but 0 is true.

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
