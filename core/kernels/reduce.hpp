#pragma once
// Element-wise sums and scaling of dense vectors at memory speed. Nothing here knows of ranks.
//
// Bytes hold whole elements of f32 or bf16, at any alignment; lengths must agree (CHECKed). A bf16 sum is formed
// in f32 and rounded once, to nearest even. NaN results are canonical: a + b and b + a have equal bits.

#include "base/types.hpp"

namespace telegrad::kernels {

/// accumulator[i] += addend[i]
void add(DType dtype, Bytes accumulator, ConstBytes addend);

/// out[i] = a[i] ∘ b[i]; a sum for an average. `out` as for add_to.
void reduce_to(DType dtype, Reduction reduction, ConstBytes a, ConstBytes b, Bytes out);

/// out[i] = a[i] + b[i]. `out` may be `a` or `b`, but must not overlap them otherwise.
void add_to(DType dtype, ConstBytes a, ConstBytes b, Bytes out);

/// values[i] *= factor
void scale(DType dtype, Bytes values, float factor);

namespace reference {
void add_to(DType dtype, ConstBytes a, ConstBytes b, Bytes out);
void scale(DType dtype, Bytes values, float factor);
}  // namespace reference

}  // namespace telegrad::kernels
