#include "kernels/low_rank.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/check.hpp"
#include "kernels/dispatch.hpp"

namespace telegrad::kernels {
namespace {

constexpr double kDependent = 1e-6;  // of a column's length: what is left of it beside the others is rounding

// The sum of `lines` of `width` terms each, which it writes over: the second half is added to the first, again and
// again. It ends in the first line.
void add_halves(double* terms, std::size_t lines, std::size_t width) {
  while (lines > 1) {
    const std::size_t half = (lines + 1) / 2, count = (lines - half) * width;
    const double* const second = terms + half * width;
    for (std::size_t i = 0; i < count; ++i) terms[i] += second[i];
    lines = half;
  }
}

double product_of(std::span<const double> a, std::span<const double> b, std::span<double> scratch) {
  for (std::size_t i = 0; i < a.size(); ++i) scratch[i] = a[i] * b[i];
  add_halves(scratch.data(), a.size(), 1);
  return scratch[0];
}

using ProductFunction = void(const float* left, const float* right, float* out, std::size_t rows, std::size_t columns,
                             std::size_t rank);

using Group = float __attribute__((vector_size(64)));
constexpr std::size_t kGroup = 16;

// Sums of a group stay in registers, and right's values serve `kRows` rows.
template <std::size_t kRows>
[[gnu::always_inline]] inline void add_products(const float* left, const float* right, float* out, std::size_t columns,
                                                std::size_t rank) {
  std::size_t j = 0;
  for (; j + kGroup <= columns; j += kGroup) {
    Group sums[kRows];
    Group line;
    std::memcpy(&line, right + j, sizeof line);
    for (std::size_t row = 0; row < kRows; ++row) sums[row] = left[row * rank] * line;
    for (std::size_t k = 1; k < rank; ++k) {
      std::memcpy(&line, right + k * columns + j, sizeof line);
      for (std::size_t row = 0; row < kRows; ++row) sums[row] += left[row * rank + k] * line;
    }
    for (std::size_t row = 0; row < kRows; ++row) std::memcpy(out + row * columns + j, &sums[row], sizeof sums[row]);
  }
  for (; j < columns; ++j) {
    for (std::size_t row = 0; row < kRows; ++row) {
      float sum = left[row * rank] * right[j];
      for (std::size_t k = 1; k < rank; ++k) sum += left[row * rank + k] * right[k * columns + j];
      out[row * columns + j] = sum;
    }
  }
}

[[gnu::always_inline]] inline void product(const float* left, const float* right, float* out, std::size_t rows,
                                           std::size_t columns, std::size_t rank) {
  constexpr std::size_t kTogether = 4;
  std::size_t i = 0;
  for (; i + kTogether <= rows; i += kTogether) {
    add_products<kTogether>(left + i * rank, right, out + i * columns, columns, rank);
  }
  for (; i < rows; ++i) add_products<1>(left + i * rank, right, out + i * columns, columns, rank);
}

void product_portable(const float* left, const float* right, float* out, std::size_t rows, std::size_t columns,
                      std::size_t rank) {
  product(left, right, out, rows, columns, rank);
}

#if TELEGRAD_KERNELS_X86

TELEGRAD_AVX2 void product_avx2(const float* left, const float* right, float* out, std::size_t rows, std::size_t columns,
                                std::size_t rank) {
  product(left, right, out, rows, columns, rank);
}

TELEGRAD_AVX512 void product_avx512(const float* left, const float* right, float* out, std::size_t rows,
                                    std::size_t columns, std::size_t rank) {
  product(left, right, out, rows, columns, rank);
}

constexpr Variants<ProductFunction> kProduct{product_portable, product_avx2, product_avx512};

#else

constexpr Variants<ProductFunction> kProduct{product_portable};

#endif

}  // namespace

void low_rank_product(std::span<const float> left, std::span<const float> right, std::size_t rank, std::span<float> out) {
  if (rank == 0) {
    std::ranges::fill(out, 0.0F);
    return;
  }
  TELEGRAD_CHECK(left.size() % rank == 0 && right.size() % rank == 0);
  const std::size_t rows = left.size() / rank, columns = right.size() / rank;
  TELEGRAD_CHECK(out.size() == rows * columns);
  kProduct(left.data(), right.data(), out.data(), rows, columns, rank);
}

void orthonormal_basis(std::span<const float> columns, std::size_t rows, std::span<float> basis) {
  TELEGRAD_CHECK(rows > 0 && columns.size() % rows == 0 && basis.size() == columns.size());
  const std::size_t count = columns.size() / rows;
  std::vector<double> made(columns.begin(), columns.end()), scratch(rows);
  const auto column = [&](std::size_t k) { return std::span<double>(made).subspan(k * rows, rows); };
  std::vector<double> lengths(count);
  for (std::size_t k = 0; k < count; ++k) lengths[k] = std::sqrt(product_of(column(k), column(k), scratch));
  for (std::size_t k = 0; k < count; ++k) {
    const std::span<double> own = column(k);
    const double length = std::sqrt(product_of(own, own, scratch));
    if (!(length > kDependent * lengths[k])) {
      std::ranges::fill(own, 0.0);
      continue;
    }
    for (double& one : own) one /= length;
    for (std::size_t other = k + 1; other < count; ++other) {
      const double share = product_of(own, column(other), scratch);
      double* const values = column(other).data();
      for (std::size_t i = 0; i < rows; ++i) values[i] -= own[i] * share;
    }
  }
  for (std::size_t k = 0; k < count; ++k)
    for (std::size_t i = 0; i < rows; ++i) basis[i * count + k] = static_cast<float>(made[k * rows + i]);
}

void squared_lengths(std::span<const float> matrix, std::span<double> squares) {
  const std::size_t columns = squares.size();
  TELEGRAD_CHECK(columns > 0 && !matrix.empty() && matrix.size() % columns == 0);
  std::vector<double> terms(matrix.begin(), matrix.end());
  for (double& one : terms) one *= one;
  add_halves(terms.data(), matrix.size() / columns, columns);
  std::copy_n(terms.begin(), columns, squares.begin());
}

}  // namespace telegrad::kernels
