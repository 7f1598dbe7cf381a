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

using Group = float __attribute__((vector_size(64)));
constexpr std::size_t kGroup = 16;
constexpr std::size_t kTile = 2048;  // columns whose rows stay in the first cache

[[gnu::always_inline]] inline void get(Group& values, const float* from) { std::memcpy(&values, from, sizeof values); }

[[gnu::always_inline]] inline void put(const Group& values, float* to) { std::memcpy(to, &values, sizeof values); }

// Its lanes, halves added again and again.
[[gnu::always_inline]] inline float added_up(const Group& group) {
  float lanes[kGroup];
  put(group, lanes);
  for (std::size_t half = kGroup / 2; half > 0; half /= 2)
    for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[half + i];
  return lanes[0];
}

struct Narrow {
  std::size_t rows, columns, rank;
};

using ProductFunction = void(const float* left, const float* right, float* out, const Narrow& sizes);
using AddFunction = double(const float* before, const float* added, const float* lines, float* sum, float* out,
                           const Narrow& sizes);
using SubtractFunction = double(const float* left, const float* right, float* matrix, const Narrow& sizes);

// Products of a group of columns, of which `right` is the first. Sums stay in registers, and right's values serve `kRows`
// rows.
template <std::size_t kRows>
[[gnu::always_inline]] inline void products_of_group(const float* left, const float* right, Group (&sums)[kRows],
                                                     std::size_t columns, std::size_t rank) {
  Group line;
  get(line, right);
  for (std::size_t row = 0; row < kRows; ++row) sums[row] = left[row * rank] * line;
  for (std::size_t k = 1; k < rank; ++k) {
    get(line, right + k * columns);
    for (std::size_t row = 0; row < kRows; ++row) sums[row] += left[row * rank + k] * line;
  }
}

[[gnu::always_inline]] inline float product_of_one(const float* left, const float* right, std::size_t columns,
                                                   std::size_t rank) {
  float sum = left[0] * right[0];
  for (std::size_t k = 1; k < rank; ++k) sum += left[k] * right[k * columns];
  return sum;
}

template <std::size_t kRows>
[[gnu::always_inline]] inline void add_products(const float* left, const float* right, float* out, std::size_t columns,
                                                std::size_t rank) {
  std::size_t j = 0;
  for (; j + kGroup <= columns; j += kGroup) {
    Group sums[kRows];
    products_of_group(left, right + j, sums, columns, rank);
    for (std::size_t row = 0; row < kRows; ++row) put(sums[row], out + row * columns + j);
  }
  for (; j < columns; ++j) {
    for (std::size_t row = 0; row < kRows; ++row) {
      out[row * columns + j] = product_of_one(left + row * rank, right + j, columns, rank);
    }
  }
}

[[gnu::always_inline]] inline void product(const float* left, const float* right, float* out, const Narrow& sizes) {
  constexpr std::size_t kTogether = 4;
  const auto [rows, columns, rank] = sizes;
  std::size_t i = 0;
  for (; i + kTogether <= rows; i += kTogether) {
    add_products<kTogether>(left + i * rank, right, out + i * columns, columns, rank);
  }
  for (; i < rows; ++i) add_products<1>(left + i * rank, right, out + i * columns, columns, rank);
}

// Writes before + added into `sum`, of `count` rows and `width` of their columns. The squared length, whose lanes are added
// up once a row.
[[gnu::always_inline]] inline double add_rows(const float* before, const float* added, float* sum, std::size_t count,
                                              std::size_t width, std::size_t columns) {
  double length = 0;
  for (std::size_t row = 0; row < count; ++row, before += columns, added += columns, sum += columns) {
    Group squares{};
    float rest = 0;
    std::size_t j = 0;
    for (; j + kGroup <= width; j += kGroup) {
      Group made, other;
      get(made, before + j);
      get(other, added + j);
      made += other;
      squares += made * made;
      put(made, sum + j);
    }
    for (; j < width; ++j) {
      sum[j] = before[j] + added[j];
      rest += sum[j] * sum[j];
    }
    length += static_cast<double>(added_up(squares)) + static_cast<double>(rest);
  }
  return length;
}

// Adds rows · linesᵀ to `out`, for `kRows` rows and `kLines` lines of `width` columns, which lie `columns` apart.
template <std::size_t kRows, std::size_t kLines>
[[gnu::always_inline]] inline void add_dot_products(const float* matrix, const float* lines, float* out,
                                                    std::size_t width, const Narrow& sizes) {
  const auto [rows, columns, rank] = sizes;
  Group sums[kRows][kLines]{};
  float rests[kRows][kLines]{};
  std::size_t j = 0;
  for (; j + kGroup <= width; j += kGroup) {
    Group held[kRows];
    for (std::size_t row = 0; row < kRows; ++row) get(held[row], matrix + row * columns + j);
    for (std::size_t k = 0; k < kLines; ++k) {
      Group line;
    get(line, lines + k * columns + j);
      for (std::size_t row = 0; row < kRows; ++row) sums[row][k] += held[row] * line;
    }
  }
  for (; j < width; ++j)
    for (std::size_t row = 0; row < kRows; ++row)
      for (std::size_t k = 0; k < kLines; ++k) rests[row][k] += matrix[row * columns + j] * lines[k * columns + j];
  for (std::size_t row = 0; row < kRows; ++row)
    for (std::size_t k = 0; k < kLines; ++k) out[k * rows + row] += added_up(sums[row][k]) + rests[row][k];
}

template <std::size_t kRows, std::size_t kLines>
[[gnu::always_inline]] inline void add_dot_products_of_all_lines(const float* matrix, const float* lines, float* out,
                                                                 std::size_t width, const Narrow& sizes) {
  std::size_t k = 0;
  for (; k + kLines <= sizes.rank; k += kLines) {
    add_dot_products<kRows, kLines>(matrix, lines + k * sizes.columns, out + k * sizes.rows, width, sizes);
  }
  for (; k < sizes.rank; ++k) {
    add_dot_products<kRows, 1>(matrix, lines + k * sizes.columns, out + k * sizes.rows, width, sizes);
  }
}

template <std::size_t kRows, std::size_t kLines>
[[gnu::always_inline]] inline double add_and_multiply_by(const float* before, const float* added, const float* lines,
                                                         float* sum, float* out, const Narrow& sizes) {
  const auto [rows, columns, rank] = sizes;
  std::fill_n(out, rows * rank, 0.0F);
  double squares = 0;
  for (std::size_t first = 0; first < columns; first += kTile) {
    const std::size_t width = std::min(kTile, columns - first);
    std::size_t i = 0;
    for (; i + kRows <= rows; i += kRows) {
      const std::size_t at = i * columns + first;
      squares += add_rows(before + at, added + at, sum + at, kRows, width, columns);
      add_dot_products_of_all_lines<kRows, kLines>(sum + at, lines + first, out + i, width, sizes);
    }
    for (; i < rows; ++i) {
      const std::size_t at = i * columns + first;
      squares += add_rows(before + at, added + at, sum + at, 1, width, columns);
      add_dot_products_of_all_lines<1, kLines>(sum + at, lines + first, out + i, width, sizes);
    }
  }
  return squares;
}

// Adds leftᵀ · matrix to `out`, for `kRows` rows and `width` columns.
template <std::size_t kRows>
[[gnu::always_inline]] inline void add_outer_products(const float* left, const float* matrix, float* out,
                                                      std::size_t width, const Narrow& sizes) {
  const auto [rows, columns, rank] = sizes;
  std::size_t j = 0;
  for (; j + kGroup <= width; j += kGroup) {
    Group held[kRows];
    for (std::size_t row = 0; row < kRows; ++row) get(held[row], matrix + row * columns + j);
    for (std::size_t k = 0; k < rank; ++k) {
      float* const to = out + k * columns + j;
      Group sum;
      get(sum, to);
      for (std::size_t row = 0; row < kRows; ++row) sum += left[row * rank + k] * held[row];
      put(sum, to);
    }
  }
  for (; j < width; ++j)
    for (std::size_t k = 0; k < rank; ++k) {
      float sum = out[k * columns + j];
      for (std::size_t row = 0; row < kRows; ++row) sum += left[row * rank + k] * matrix[row * columns + j];
      out[k * columns + j] = sum;
    }
}

[[gnu::always_inline]] inline void transposed(const float* left, const float* matrix, float* out, const Narrow& sizes) {
  constexpr std::size_t kTogether = 8;
  const auto [rows, columns, rank] = sizes;
  std::fill_n(out, rank * columns, 0.0F);
  for (std::size_t first = 0; first < columns; first += kTile) {
    const std::size_t width = std::min(kTile, columns - first);
    std::size_t i = 0;
    for (; i + kTogether <= rows; i += kTogether) {
      add_outer_products<kTogether>(left + i * rank, matrix + i * columns + first, out + first, width, sizes);
    }
    for (; i < rows; ++i) {
      add_outer_products<1>(left + i * rank, matrix + i * columns + first, out + first, width, sizes);
    }
  }
}

// The squared length of what is left of `kRows` rows.
template <std::size_t kRows>
[[gnu::always_inline]] inline double subtract_products(const float* left, const float* right, float* matrix,
                                                       std::size_t columns, std::size_t rank) {
  Group squares[kRows]{};
  float rests[kRows]{};
  std::size_t j = 0;
  for (; j + kGroup <= columns; j += kGroup) {
    Group sums[kRows];
    products_of_group(left, right + j, sums, columns, rank);
    for (std::size_t row = 0; row < kRows; ++row) {
      Group rest;
      get(rest, matrix + row * columns + j);
      rest -= sums[row];
      squares[row] += rest * rest;
      put(rest, matrix + row * columns + j);
    }
  }
  for (; j < columns; ++j) {
    for (std::size_t row = 0; row < kRows; ++row) {
      float& one = matrix[row * columns + j];
      one -= product_of_one(left + row * rank, right + j, columns, rank);
      rests[row] += one * one;
    }
  }
  double length = 0;
  for (std::size_t row = 0; row < kRows; ++row) {
    length += static_cast<double>(added_up(squares[row])) + static_cast<double>(rests[row]);
  }
  return length;
}

[[gnu::always_inline]] inline double subtracted(const float* left, const float* right, float* matrix,
                                                const Narrow& sizes) {
  constexpr std::size_t kTogether = 4;
  const auto [rows, columns, rank] = sizes;
  double length = 0;
  std::size_t i = 0;
  for (; i + kTogether <= rows; i += kTogether) {
    length += subtract_products<kTogether>(left + i * rank, right, matrix + i * columns, columns, rank);
  }
  for (; i < rows; ++i) length += subtract_products<1>(left + i * rank, right, matrix + i * columns, columns, rank);
  return length;
}

// Rows and lines together: as many sums as registers hold.
#define TELEGRAD_LOW_RANK(level, attributes, kRows, kLines)                                                            \
  attributes void product_##level(const float* left, const float* right, float* out, const Narrow& sizes) {            \
    product(left, right, out, sizes);                                                                                  \
  }                                                                                                                    \
  attributes void transposed_##level(const float* left, const float* matrix, float* out, const Narrow& sizes) {        \
    transposed(left, matrix, out, sizes);                                                                              \
  }                                                                                                                    \
  attributes double add_##level(const float* before, const float* added, const float* lines, float* sum, float* out,   \
                                const Narrow& sizes) {                                                                 \
    return add_and_multiply_by<kRows, kLines>(before, added, lines, sum, out, sizes);                                  \
  }                                                                                                                    \
  attributes double subtract_##level(const float* left, const float* right, float* matrix, const Narrow& sizes) {      \
    return subtracted(left, right, matrix, sizes);                                                                     \
  }

TELEGRAD_LOW_RANK(portable, , 2, 2)

#if TELEGRAD_KERNELS_X86

TELEGRAD_LOW_RANK(avx2, TELEGRAD_AVX2, 2, 2)
TELEGRAD_LOW_RANK(avx512, TELEGRAD_AVX512, 4, 4)

constexpr Variants<ProductFunction> kProduct{product_portable, product_avx2, product_avx512};
constexpr Variants<ProductFunction> kTransposed{transposed_portable, transposed_avx2, transposed_avx512};
constexpr Variants<AddFunction> kAdd{add_portable, add_avx2, add_avx512};
constexpr Variants<SubtractFunction> kSubtract{subtract_portable, subtract_avx2, subtract_avx512};

#else

constexpr Variants<ProductFunction> kProduct{product_portable}, kTransposed{transposed_portable};
constexpr Variants<AddFunction> kAdd{add_portable};
constexpr Variants<SubtractFunction> kSubtract{subtract_portable};

#endif

#undef TELEGRAD_LOW_RANK

}  // namespace

void low_rank_product(std::span<const float> left, std::span<const float> right, std::size_t rank, std::span<float> out) {
  if (rank == 0) {
    std::ranges::fill(out, 0.0F);
    return;
  }
  TELEGRAD_CHECK(left.size() % rank == 0 && right.size() % rank == 0);
  const std::size_t rows = left.size() / rank, columns = right.size() / rank;
  TELEGRAD_CHECK(out.size() == rows * columns);
  kProduct(left.data(), right.data(), out.data(), Narrow{rows, columns, rank});
}

double add_and_multiply(std::span<const float> before, std::span<const float> added, std::span<const float> lines,
                        std::size_t rank, std::span<float> sum, std::span<float> out) {
  TELEGRAD_CHECK(rank > 0 && !lines.empty() && lines.size() % rank == 0 && out.size() % rank == 0);
  const std::size_t rows = out.size() / rank, columns = lines.size() / rank;
  TELEGRAD_CHECK(sum.size() == rows * columns && before.size() == sum.size() && added.size() == sum.size());
  return kAdd(before.data(), added.data(), lines.data(), sum.data(), out.data(), Narrow{rows, columns, rank});
}

void multiply_transposed(std::span<const float> left, std::span<const float> matrix, std::size_t rank,
                         std::span<float> out) {
  TELEGRAD_CHECK(rank > 0 && left.size() % rank == 0 && out.size() % rank == 0);
  const std::size_t rows = left.size() / rank, columns = out.size() / rank;
  TELEGRAD_CHECK(matrix.size() == rows * columns);
  kTransposed(left.data(), matrix.data(), out.data(), Narrow{rows, columns, rank});
}

double subtract_product(std::span<const float> left, std::span<const float> right, std::size_t rank,
                        std::span<float> matrix) {
  TELEGRAD_CHECK(rank > 0 && left.size() % rank == 0 && right.size() % rank == 0);
  const std::size_t rows = left.size() / rank, columns = right.size() / rank;
  TELEGRAD_CHECK(matrix.size() == rows * columns);
  return kSubtract(left.data(), right.data(), matrix.data(), Narrow{rows, columns, rank});
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
