// Newton's steps with an L1 penalty, on the features whose weights are not 0 or may leave it.
#include <algorithm>
#include <cmath>

#include "kernels/row_products.hpp"
#include "linear/lasso.hpp"
#include "linear/newton.hpp"
#include "linear/rounding.hpp"

namespace telegrad::linear {
namespace {

using kernels::rounded;

constexpr double kMayLeave = 0.9;            // of l1: a weight that is 0 may move where its slope is above
constexpr double kOfWorst = 0.1, kOfWorstDirectly = 1e-3;  // of the least subgradient is left by a step with an L1 penalty
constexpr double kOfGoal = 0.25;             // of what the tolerance asks: no step needs to leave less
constexpr std::size_t kMostProducts = 2000;  // of such a step
constexpr double kLeastDiagonal = 1e-12;
constexpr std::uint32_t kNowhere = 0xffffffff;

}  // namespace

// Of the weights after that part of a step.
double Newton::absolute(double part) const {
  double sum = 0;
  for (std::size_t i = 0; i < weights(); ++i) sum += std::abs(w_[i] + part * step_[i]);
  return sum;
}

// As a part of the objective, at most 1. `worst`: the largest element of the least subgradient. Of the bias's slope it is an
// estimate, for optima whose bias is not more than 1 + |bias| away.
double Newton::gap_with_l1(double& worst) const {
  double along = 0;
  worst = 0;
  for (std::size_t i = 0; i < weights(); ++i) {
    const double one = least_slope(w_[i], gradient_[i], problem_.l1);
    worst = std::max(worst, std::abs(one));
    along += one * w_[i];
  }
  const double objective = smoothed_ + penalty_, slope = std::abs(gradient_.back());
  const double above = along + worst * objective / problem_.l1 + slope * (1 + std::abs(w_.back()));
  worst = std::max(worst, slope);
  return objective > 0 ? std::clamp(above / objective, 0.0, 1.0) : 0;
}

Newton::Step Newton::step_with_l1() {
  find_gradient();
  double worst = 0;
  Step done{.loss = loss_, .objective = loss_ + penalty_, .gap = gap_with_l1(worst), .sums = sums_};
  done.converged = done.gap <= problem_.tolerance;
  if (done.converged && !direct_) return done;  // where steps are cheap, one more makes the model as exact as others are
  const double goal = done.converged ? 0 : worst * problem_.tolerance / done.gap;  // to which it must fall, about
  solve_with_l1(std::max((direct_ ? kOfWorstDirectly : kOfWorst) * worst, kOfGoal * goal));
  const bool fails = !(search() > 0);
  if (fails) evaluate(0);
  done.stuck = fails && !done.converged;
  done.loss = loss_;
  done.objective = loss_ + penalty_;
  done.sums = sums_;
  return done;
}

// step_ of the quadratic model.
void Newton::solve_with_l1(double target) {
  if (direct_) sum_hessian();
  choose_active();
  const std::size_t count = active_.size(), n = width();
  std::vector<double> gradient(count + 1), diagonal(count + 1), z(count + 1);
  for (std::size_t i = 0; i <= count; ++i) {
    const std::size_t feature = i < count ? active_[i] : problem_.features;
    gradient[i] = gradient_[feature];
    z[i] = w_[feature];
    if (direct_) diagonal[i] = hessian_[feature * n + feature];
  }
  if (!direct_) {
    const double magic = rounding_ * power_of_two(bound_of_curvatures());
    for (std::size_t i = 0; i < rows(); ++i) {
      for (std::uint64_t e = active_offsets_[i]; e < active_offsets_[i + 1]; ++e) {
        const double largest = largest_[active_[active_indices_[e]]], value = static_cast<double>(active_values_[e]);
        diagonal[active_indices_[e]] += rounded(curvatures_[i] * value * value, magic * (largest * largest));
      }
      if (problem_.with_bias) diagonal[count] += rounded(curvatures_[i], magic);
    }
    reduce(diagonal, 0);
    for (std::size_t i = 0; i <= count; ++i) diagonal[i] = diagonal[i] / total_weight_ + (i < count ? problem_.l2 : 0);
  }
  for (double& one : diagonal) one = std::max(one, kLeastDiagonal);
  const auto by_hessian = [&](std::span<const double> direction, std::span<double> product) {
    for (std::size_t i = 0; i <= count; ++i) {
      const std::size_t row = i < count ? active_[i] : problem_.features;
      double sum = 0;
      for (std::size_t k = 0; k <= count; ++k) {
        const std::size_t column = k < count ? active_[k] : problem_.features;
        sum += hessian_[std::max(row, column) * n + std::min(row, column)] * direction[k];
      }
      product[i] = sum;
    }
    reduce_({}, 0, Over::sum);  // Ctrl-C ends it
  };
  const auto by_rows = [&](std::span<const double> direction, std::span<double> product) {
    multiply_active(direction, product);
  };
  Lasso lasso{.gradient = gradient, .diagonal = diagonal, .l1 = problem_.l1, .penalised = count, .multiply = by_rows};
  if (direct_) lasso.multiply = by_hessian;
  minimise(lasso, target, kMostProducts, z);
  std::fill(step_.begin(), step_.end(), 0.0);
  for (std::size_t i = 0; i < count; ++i) step_[active_[i]] = z[i] - w_[active_[i]];
  step_.back() = z.back() - w_.back();
  score_rows(step_, moved_);
}

void Newton::choose_active() {
  active_.clear();
  for (std::size_t i = 0; i < weights(); ++i) {
    const bool moves = w_[i] != 0 || std::abs(gradient_[i]) > kMayLeave * problem_.l1;
    places_[i] = moves ? static_cast<std::uint32_t>(active_.size()) : kNowhere;
    if (moves) active_.push_back(static_cast<std::uint32_t>(i));
  }
  if (direct_) return;
  active_offsets_.assign(1, 0);
  active_indices_.clear();
  active_values_.clear();
  std::vector<std::uint64_t> entries(active_.size());
  for (std::size_t i = 0; i < rows(); ++i) {
    const std::uint64_t row = problem_.chosen[i], end = problem_.rows.offsets[row + 1];
    for (std::uint64_t e = problem_.rows.offsets[row]; e < end && curvatures_[i] != 0; ++e) {
      const std::uint32_t place = places_[problem_.rows.indices[e]];
      if (place == kNowhere) continue;
      active_indices_.push_back(place);
      active_values_.push_back(problem_.rows.values[e]);
      ++entries[place];
    }
    active_offsets_.push_back(active_indices_.size());
  }
  active_borders_.assign(team_.size() + 1, active_.size());
  active_borders_[0] = 0;
  std::uint64_t before = 0;
  for (std::size_t i = 0, part = 1; i < active_.size() && part < team_.size(); before += entries[i++]) {
    if (before * team_.size() >= active_indices_.size() * part) active_borders_[part++] = i;
  }
}

// product = Hessian · direction, of the active features and the bias.
void Newton::multiply_active(std::span<const double> direction, std::span<double> product) {
  const std::size_t count = active_.size();
  double most = 0;
  for (std::size_t i = 0; i < count; ++i) most = std::max(most, std::abs(direction[i]) * largest_[active_[i]]);
  const double largest = bound_of_curvatures() * (most_entries_ * most + std::abs(direction[count]));
  const double magic = rounding_ * power_of_two(largest);
  team_.run([&](std::size_t part) {
    const std::size_t end = rows() * (part + 1) / team_.size();
    for (std::size_t i = rows() * part / team_.size(); i < end; ++i) {
      double sum = direction[count];
      for (std::uint64_t e = active_offsets_[i]; e < active_offsets_[i + 1]; ++e) {
        sum += direction[active_indices_[e]] * static_cast<double>(active_values_[e]);
      }
      along_[i] = sum * curvatures_[i];
    }
  });
  std::fill(product.begin(), product.end(), 0.0);
  team_.run([&](std::size_t part) {
    const std::size_t first = active_borders_[part], last = active_borders_[part + 1];
    const std::uint32_t* const indices = active_indices_.data();
    for (std::size_t i = 0; i < rows(); ++i) {
      if (along_[i] == 0) continue;
      std::uint64_t begin = active_offsets_[i], end = active_offsets_[i + 1];
      if (team_.size() > 1) {
        begin = static_cast<std::uint64_t>(std::lower_bound(indices + begin, indices + end, first) - indices);
        end = static_cast<std::uint64_t>(std::lower_bound(indices + begin, indices + end, last) - indices);
      }
      for (std::uint64_t e = begin; e < end; ++e) {
        const double term = along_[i] * static_cast<double>(active_values_[e]);
        product[indices[e]] += rounded(term, magic * largest_[active_[indices[e]]]);
      }
    }
  });
  for (std::size_t i = 0; i < rows() && problem_.with_bias; ++i) product[count] += rounded(along_[i], magic);
  reduce(product, 0);
  for (std::size_t i = 0; i <= count; ++i) {
    product[i] = product[i] / total_weight_ + (i < count ? problem_.l2 * direction[i] : 0);
  }
}

}  // namespace telegrad::linear
