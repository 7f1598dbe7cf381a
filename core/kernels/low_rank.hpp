#pragma once
// The product of two narrow matrices, with the same bits on every CPU.

#include <cstddef>
#include <span>

namespace telegrad::kernels {

/// out[i, j] = left[i, 0] * right[0, j] + left[i, 1] * right[1, j] + …, by rows: `left` is rows x rank, `right` rank x
/// columns, `out` rows x columns. Terms are added in this order, each rounded to float, so ranks on different CPUs get
/// the same. CHECKs that the sizes fit; a rank of 0 gives zeros.
void low_rank_product(std::span<const float> left, std::span<const float> right, std::size_t rank, std::span<float> out);

}  // namespace telegrad::kernels
