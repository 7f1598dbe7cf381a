#pragma once
// Dense vectors times a number, at memory speed.

#include "base/types.hpp"

namespace telegrad::kernels {

/// values[i] *= factor, which is rounded first to the precision that is computed in: f64 for f64, f32 for f32, f16 and
/// bf16 (CHECKed: no other dtype). Bytes hold whole elements, at any alignment. A NaN result is canonical.
void scale(DType dtype, Bytes values, double factor);

namespace reference {
void scale(DType dtype, Bytes values, double factor);
}  // namespace reference

}  // namespace telegrad::kernels
