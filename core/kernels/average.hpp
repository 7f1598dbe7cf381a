#pragma once
// Sums of 16-bit floats on their way to an average. f16 ends at 65,504, which a sum may leave though the average of its
// addends cannot: so partial sums of f16 are kept halved, once for each doubling of the number of addends.

#include "base/types.hpp"

namespace telegrad::kernels {

/// What a factor makes of all elements of a vector.
struct ScaledVector {
  ConstBytes values;
  float factor = 1.0F;
};

/// out[i] = (a[i]·a.factor + b[i]·b.factor)·factor, of f16 or bf16 (CHECKed), computed in f32 and rounded once, to nearest
/// even. Of f16 a result of two finite elements is finite: ±65,504 where it would be beyond. The same bits as with `a` and
/// `b` exchanged; a NaN result is canonical. Bytes hold whole elements, as many (CHECKed), at any alignment; `out` may be
/// a's or b's, but must not overlap them otherwise.
void add_scaled(DType dtype, ScaledVector a, ScaledVector b, float factor, Bytes out);

namespace reference {
void add_scaled(DType dtype, ScaledVector a, ScaledVector b, float factor, Bytes out);
}  // namespace reference

}  // namespace telegrad::kernels
