#pragma once
// What products of low rank need of narrow matrices, with the same bits on every CPU.

#include <cstddef>
#include <span>

namespace telegrad::kernels {

/// out[i, j] = left[i, 0] * right[0, j] + left[i, 1] * right[1, j] + …, by rows: `left` is rows x rank, `right` rank x
/// columns, `out` rows x columns. Terms are added in this order, each rounded to float, so ranks on different CPUs get
/// the same. CHECKs that the sizes fit; a rank of 0 gives zeros.
void low_rank_product(std::span<const float> left, std::span<const float> right, std::size_t rank, std::span<float> out);

/// Makes columns orthogonal to those before them and of length 1, one after another. One of which less than 1e-6 is
/// left beside those before becomes zero. `columns` are one after another, each of `rows` elements; `basis` is rows x
/// columns, by rows. Sums add halves again and again. CHECKs that the sizes fit.
void orthonormal_basis(std::span<const float> columns, std::size_t rows, std::span<float> basis);

/// The squares of each column's length, of a matrix by rows, added as above. CHECKs that the sizes fit.
void squared_lengths(std::span<const float> matrix, std::span<double> squares);

}  // namespace telegrad::kernels
