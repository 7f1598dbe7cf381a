#pragma once
// The Hessian of a linear model: the sum over rows of curvature·x·xᵀ, whose terms are rounded so that no sum of them
// rounds. So every order of the rows gives the same bits (Demmel and Nguyen 2013).

#include <cstddef>
#include <cstdint>
#include <span>

namespace telegrad::kernels {

inline constexpr std::size_t kMostColumns = 512;

/// x as a multiple of a number that `magic`, 1.5 times a power of two, determines.
inline double rounded(double x, double magic) { return (x + magic) - magic; }

/// A thread's part: the lines from `first` on, before `end`, up to the diagonal, of a matrix that is `width` wide, at
/// most kMostColumns. `curvatures` are those of the rows `chosen`, and are divided by `largest_curvature`. `inverses`,
/// powers of two by which values are multiplied, and `magics` are the columns'. `bias_line`, if any, is the matrix's
/// line of a last column of ones.
struct RowProducts {
  std::span<const std::uint64_t> offsets;
  std::span<const std::uint32_t> indices;
  std::span<const float> values;
  std::span<const std::uint64_t> chosen;
  const double* curvatures;
  double largest_curvature;
  const double *inverses, *magics;
  double rounding;
  double *hessian, *bias_line;
  std::size_t width, first, end;
};

void add_row_products(const RowProducts& part);

}  // namespace telegrad::kernels
