// The Hessian of a model of few features, and Newton's steps by its factors.
#include <algorithm>
#include <cmath>

#include "kernels/row_products.hpp"
#include "linear/newton.hpp"
#include "linear/rounding.hpp"

namespace telegrad::linear {
namespace {

using kernels::rounded;

constexpr double kSingular = 1e-13;  // of a diagonal element

}  // namespace

// A row of the squared hinge has one curvature or none, and what a row adds can be taken away again, as sums do not round.
bool Newton::keeps_hessian() const { return problem_.loss == Loss::squared_hinge && !uneven_; }

// hessian_ is then what to add to, and the result by which curvatures: those that differ from the step before, if these are
// fewer.
const std::vector<double>& Newton::begin_hessian() {
  std::fill(hessian_.begin(), hessian_.end(), 0.0);
  if (!keeps_hessian()) return curvatures_;
  weighted_.resize(rows());
  std::size_t curved = 0, changed = 0;
  for (std::size_t i = 0; i < rows(); ++i) {
    const double before = curved_[i] != 0 ? 2 * weight(problem_.chosen[i]) : 0;
    weighted_[i] = curvatures_[i] - before;
    curved += curvatures_[i] != 0;
    changed += weighted_[i] != 0;
    curved_[i] = curvatures_[i] != 0;
  }
  if (changed >= curved) return curvatures_;
  hessian_ = kept_hessian_;
  return weighted_;
}

// Its lower triangle.
void Newton::sum_hessian() {
  const std::size_t n = width();
  const std::vector<double>& curvatures = begin_hessian();
  double* const last = hessian_.data() + (n - 1) * n;  // the bias's row
  const double largest = power_of_two(bound_of_curvatures());
  // rows of the Hessian are those of columns divided by `largest` and their own
  LargeVector<double> magics(problem_.features), inverses(problem_.features);
  for (std::size_t i = 0; i < problem_.features; ++i) {
    magics[i] = rounding_ * largest_[i];
    inverses[i] = 1 / largest_[i];
  }
  std::vector<double> rests(uneven_ ? n * n : 0);
  const auto add_finely = [&](std::size_t place, double term, double magic) {
    const double most = rounded(term, magic);
    hessian_[place] += most;
    rests[place] += rounded(term - most, magic * tail_);
  };
  for (std::size_t i = 0; i < rows() && uneven_; ++i) {
    const std::uint64_t row = problem_.chosen[i], end = problem_.rows.offsets[row + 1];
    const double curvature = curvatures[i] / largest;
    for (std::uint64_t e = problem_.rows.offsets[row]; e < end && curvature != 0; ++e) {
      const std::size_t column = problem_.rows.indices[e];
      const double one = static_cast<double>(problem_.rows.values[e]) * inverses[column];
      for (std::uint64_t f = problem_.rows.offsets[row]; f <= e; ++f) {
        const std::size_t other = problem_.rows.indices[f];
        add_finely(column * n + other, curvature * one * static_cast<double>(problem_.rows.values[f]), magics[other]);
      }
      if (problem_.with_bias) add_finely((n - 1) * n + column, curvature * one, rounding_);
    }
  }
  if (!uneven_) team_.run([&](std::size_t part) {
    const auto& [offsets, indices, values] = problem_.rows;
    kernels::add_row_products({offsets, indices, values, problem_.chosen, curvatures.data(), largest, inverses.data(),
                               magics.data(), rounding_, hessian_.data(), problem_.with_bias ? last : nullptr, n,
                               borders_[part], borders_[part + 1]});
  });
  if (problem_.with_bias) {
    for (const double curvature : curvatures) last[n - 1] += rounded(curvature / largest, rounding_);
  }
  if (keeps_hessian()) kept_hessian_ = hessian_;
  reduce(hessian_, 0);
  if (uneven_) {
    reduce(rests, 0);
    for (std::size_t i = 0; i < rests.size(); ++i) hessian_[i] += rests[i];
  }
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t k = 0; k <= i; ++k) {
      const double of_column = i + 1 < n ? largest_[i] : k + 1 < n ? largest_[k] : 1;
      hessian_[i * n + k] = hessian_[i * n + k] * (largest * of_column) / total_weight_;
    }
  }
  if (is_hinge() && problem_.with_bias) last[n - 1] += of_bias_;
  for (std::size_t i = 0; i + 1 < n; ++i) hessian_[i * n + i] += problem_.l2;
}

bool Newton::solve_directly(double& predicted) {
  const std::size_t n = width();
  sum_hessian();
  // Cholesky; a variable without curvature of its own does not move
  for (std::size_t i = 0; i < n; ++i) {
    double* const row = hessian_.data() + i * n;
    const double before = row[i];
    for (std::size_t j = 0; j <= i; ++j) {
      const double* const other = hessian_.data() + j * n;
      double sums[2] = {};
      std::size_t k = 0;
      for (; k + 2 <= j; k += 2) {
        sums[0] += row[k] * other[k];
        sums[1] += row[k + 1] * other[k + 1];
      }
      if (k < j) sums[0] += row[k] * other[k];
      const double rest = row[j] - (sums[0] + sums[1]);
      if (j < i) {
        row[j] = other[j] > 0 ? rest / other[j] : 0;
      } else {
        row[i] = rest > kSingular * before ? std::sqrt(rest) : 0;
      }
    }
  }
  for (std::size_t i = 0; i < n; ++i) {
    double rest = -gradient_[i];
    for (std::size_t k = 0; k < i; ++k) rest -= hessian_[i * n + k] * step_[k];
    step_[i] = hessian_[i * n + i] > 0 ? rest / hessian_[i * n + i] : 0;
  }
  for (std::size_t i = n; i-- > 0;) {
    step_[i] = hessian_[i * n + i] > 0 ? step_[i] / hessian_[i * n + i] : 0;
    for (std::size_t k = 0; k < i; ++k) step_[k] -= hessian_[i * n + k] * step_[i];
  }
  for (std::size_t i = 0; i < n; ++i) predicted -= gradient_[i] * step_[i] / 2;
  return std::isfinite(predicted) && predicted > 0;
}

}  // namespace telegrad::linear
