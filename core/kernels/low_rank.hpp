#pragma once
// What products of low rank need: of matrices as large as a gradient, which are read and written as seldom as can be, and
// of the narrow ones between them. All with the same bits on every CPU.

#include <cstddef>
#include <span>

namespace telegrad::kernels {

/// out[i, j] = left[i, 0] * right[0, j] + left[i, 1] * right[1, j] + …, by rows: `left` is rows x rank, `right` rank x
/// columns, `out` rows x columns. Terms are added in this order, each rounded to float, so ranks on different CPUs get
/// the same. CHECKs that the sizes fit; a rank of 0 gives zeros.
void low_rank_product(std::span<const float> left, std::span<const float> right, std::size_t rank, std::span<float> out);

/// Writes before + added into `sum`, a matrix by rows, and sum · linesᵀ into `out`: lines are rank x columns, `out` is rank
/// x rows. Returns the sum's squared length. `before` may be `sum` itself. CHECKs that the sizes fit.
double add_and_multiply(std::span<const float> before, std::span<const float> added, std::span<const float> lines,
                        std::size_t rank, std::span<float> sum, std::span<float> out);

/// Writes leftᵀ · matrix into `out`: `matrix` is by rows, `left` rows x rank, `out` rank x columns. CHECKs that the sizes
/// fit.
void multiply_transposed(std::span<const float> left, std::span<const float> matrix, std::size_t rank,
                         std::span<float> out);

/// Takes left · right, as of low_rank_product(), off `matrix`. Returns the squared length of what is left.
double subtract_product(std::span<const float> left, std::span<const float> right, std::size_t rank,
                        std::span<float> matrix);

/// Makes columns orthogonal to those before them and of length 1, one after another. One of which less than 1e-6 is
/// left beside those before becomes zero. `columns` are one after another, each of `rows` elements; `basis` is rows x
/// columns, by rows. Sums add halves again and again. CHECKs that the sizes fit.
void orthonormal_basis(std::span<const float> columns, std::size_t rows, std::span<float> basis);

/// The squares of each column's length, of a matrix by rows, added as above. CHECKs that the sizes fit.
void squared_lengths(std::span<const float> matrix, std::span<double> squares);

}  // namespace telegrad::kernels
