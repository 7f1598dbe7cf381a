#include "linear/dual_descent.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/check.hpp"

namespace telegrad::linear {
namespace {

constexpr double kFall = 0.25;          // of the gap, in a step
constexpr double kEnough = 0.5;         // of the gap: a step that ends above it was slow
constexpr double kMostPasses = 60;      // of a step, over all rows
constexpr double kMargin = 0.8;         // of the tolerance: the gap is estimated by scores that are a little old
constexpr double kMostInverse = 1e300;  // of rows without entries
constexpr double kNoMove = 1e-12;
constexpr int kMostTries = 100;         // of biases

std::uint64_t next(std::uint64_t& state) {  // SplitMix64
  std::uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

}  // namespace

DualDescent::DualDescent(const Newton::Problem& problem, const Fixed& fixed)
    : problem_(problem), fixed_imbalance_(fixed.imbalance), whole_(fixed.objective / problem.l2) {
  TELEGRAD_CHECK(problem.loss == Loss::hinge || problem.loss == Loss::squared_hinge);
  TELEGRAD_CHECK(problem.l2 > 0 && problem.chosen.size() < (std::uint64_t{1} << 32));
  if (problem.loss == Loss::squared_hinge) {
    TELEGRAD_CHECK(fixed.scores.empty());
    highest_dual_ = HUGE_VAL;
    softness_ = 0.5;
  }
  w_.resize(problem.features + 1);
  double total = 0, square = 0;
  rows_.reserve(problem.chosen.size());
  for (std::size_t i = 0; i < problem.chosen.size(); ++i) {
    const std::uint64_t row = problem.chosen[i];
    Row made{.begin = problem.rows.offsets[row], .end = problem.rows.offsets[row + 1],
             .target = static_cast<double>(problem.targets[row]),
             .cost = problem.row_weights.empty() ? 1 : static_cast<double>(problem.row_weights[row])};
    if (made.cost == 0) continue;
    if (!fixed.scores.empty()) made.fixed = fixed.scores[i];
    for (std::uint64_t e = made.begin; e < made.end; ++e) {
      const auto value = static_cast<double>(problem.rows.values[e]);
      made.inverse += value * value;
    }
    total += made.cost;
    square += made.cost * made.inverse;
    rows_.push_back(made);
  }
  if (problem.with_bias) strength_ = square > 0 ? square / total : 1;
  if (fixed.total_weight > 0) total = fixed.total_weight;
  TELEGRAD_CHECK(!rows_.empty());
  order_.resize(rows_.size());
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    Row& row = rows_[i];
    row.cost /= problem.l2 * total;
    row.inverse = std::min(1 / (row.cost * (row.inverse + strength_) + softness_), kMostInverse);
    if (row.target > 0) positive_ += row.cost;
  }
  if (problem.with_bias) {
    excess_.resize(problem.features);
    kinks_.resize(rows_.size());
  }
}

double DualDescent::score(const Row& row) const {
  const std::uint32_t* const indices = problem_.rows.indices.data();
  const float* const values = problem_.rows.values.data();
  double sums[4] = {};
  std::uint64_t e = row.begin;
  for (; e + 4 <= row.end; e += 4) {
    for (std::size_t k = 0; k < 4; ++k) sums[k] += w_[indices[e + k]] * static_cast<double>(values[e + k]);
  }
  for (; e < row.end; ++e) sums[0] += w_[indices[e]] * static_cast<double>(values[e]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void DualDescent::add(const Row& row, double factor, LargeVector<double>& out) const {
  const std::uint32_t* const indices = problem_.rows.indices.data();
  const float* const values = problem_.rows.values.data();
  for (std::uint64_t e = row.begin; e < row.end; ++e) out[indices[e]] += factor * static_cast<double>(values[e]);
}

// An estimate of the gap, as each row's part was when its turn came.
double DualDescent::pass() {
  double highest = -HUGE_VAL, lowest = HUGE_VAL, gap = 0, bias = center_ + strength_ * imbalance_;
  for (std::size_t i = 0; i < active_; ++i) {
    std::swap(order_[i], order_[i + ((next(random_) >> 32) * (active_ - i) >> 32)]);
  }
  for (std::size_t place = 0; place < active_; ++place) {
    if (place + 2 < active_) {
      __builtin_prefetch(&rows_[order_[place + 2]]);
      const std::uint64_t begin = rows_[order_[place + 1]].begin;
      __builtin_prefetch(problem_.rows.indices.data() + begin);
      __builtin_prefetch(problem_.rows.values.data() + begin);
    }
    Row& row = rows_[order_[place]];
    const double beyond = row.target * (score(row) + row.fixed + bias) - 1, slope = beyond + softness_ * row.dual;
    gap += row.cost * (loss_of(-beyond) + row.dual * (beyond + slope) / 2);
    double projected = slope;
    if ((row.dual == 0 && slope > highest_) || (row.dual == highest_dual_ && slope < lowest_)) {
      std::swap(order_[place--], order_[--active_]);
      continue;
    }
    if (row.dual == 0) projected = std::min(slope, 0.0);
    if (row.dual == highest_dual_) projected = std::max(slope, 0.0);
    highest = std::max(highest, projected);
    lowest = std::min(lowest, projected);
    if (std::abs(projected) <= kNoMove) continue;
    const double before = row.dual;
    row.dual = std::clamp(before - slope * row.inverse, 0.0, highest_dual_);
    const double change = row.cost * (row.dual - before), factor = change * row.target;
    dual_ -= change * (slope + (row.dual - before) / row.inverse / 2);
    add(row, factor, w_);
    imbalance_ += factor;
    bias += strength_ * factor;
  }
  highest_ = highest > 0 ? highest : HUGE_VAL;
  lowest_ = lowest < 0 ? lowest : -HUGE_VAL;
  if (problem_.with_bias) center_ = bias;
  return gap;
}

double DualDescent::loss_of(double lacking) const {
  const double short_by = std::max(0.0, lacking);
  return softness_ > 0 ? short_by * short_by : short_by;
}

// The bias that is best for these weights. Where the loss is squared, the zero of its slope, by Newton's method between two
// biases of which each is on another side. Else a weighted quantile of where the rows' losses have their kinks, reordered.
double DualDescent::best_bias() {
  if (softness_ > 0) {
    double bias = w_.back(), low = -HUGE_VAL, high = HUGE_VAL;
    for (int tries = 0; tries < kMostTries; ++tries) {
      double slope = 0, curvature = 0;
      for (const auto& [kink, cost] : kinks_) {
        if (cost * (kink - bias) <= 0) continue;
        slope += std::abs(cost) * (bias - kink);
        curvature += std::abs(cost);
      }
      if (slope == 0) break;
      (slope > 0 ? high : low) = bias;
      double other = bias - slope / curvature;
      if (!(std::abs(other - bias) > kNoMove * (1 + std::abs(bias)))) break;
      if (!(other > low && other < high)) other = low + (high - low) / 2;
      bias = other;
    }
    return bias;
  }
  std::size_t first = 0, end = kinks_.size();
  for (double below = positive_ + fixed_imbalance_; end - first > 1;) {
    const std::size_t middle = first + (end - first) / 2;
    const auto at = [&](std::size_t i) { return kinks_.begin() + static_cast<std::ptrdiff_t>(i); };
    std::nth_element(at(first), at(middle), at(end));
    double sum = 0;
    for (std::size_t i = first; i < middle; ++i) sum += std::abs(kinks_[i].second);
    if (sum >= below) {
      end = middle;
    } else {
      below -= sum;
      first = middle;
    }
  }
  return kinks_[first].first;
}

// last_'s figures, and the bias.
void DualDescent::measure() {
  double square = 0, lacking = 0, duals = 0;
  for (std::size_t i = 0; i < problem_.features; ++i) square += w_[i] * w_[i];
  double norm = square;
  if (problem_.with_bias) {
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      kinks_[i] = {rows_[i].target - rows_[i].fixed - score(rows_[i]), rows_[i].target * rows_[i].cost};
    }
    w_.back() = best_bias();
    for (const auto& [kink, cost] : kinks_) {
      const double target = std::copysign(1.0, cost);
      lacking += std::abs(cost) * loss_of(target * (kink - w_.back()));
    }
    lacking -= fixed_imbalance_ * w_.back();
    double of_class[2] = {}, values[2] = {}, squares[2] = {};
    for (const Row& row : rows_) {
      of_class[row.target > 0] += row.cost * row.dual;
      values[row.target > 0] += row.cost * row.dual * (1 - row.target * row.fixed);
      squares[row.target > 0] += softness_ / 2 * row.cost * row.dual * row.dual;
    }
    const bool larger = of_class[1] + fixed_imbalance_ > of_class[0];
    const double wanted = of_class[!larger] + (larger ? -fixed_imbalance_ : fixed_imbalance_);
    const double kept = of_class[larger] > 0 ? std::max(wanted / of_class[larger], 0.0) : 1;
    kept_[larger] = kept;
    kept_[!larger] = 1;
    std::fill(excess_.begin(), excess_.end(), 0.0);
    for (const Row& row : rows_) {
      if ((row.target > 0) == larger && row.dual > 0) add(row, (1 - kept) * row.cost * row.dual * row.target, excess_);
    }
    duals = values[!larger] - squares[!larger] + kept * (values[larger] - kept * squares[larger]);
    norm = 0;
    for (std::size_t i = 0; i < problem_.features; ++i) norm += (w_[i] - excess_[i]) * (w_[i] - excess_[i]);
  } else {
    for (const Row& row : rows_) {
      lacking += row.cost * loss_of(1 - row.target * (score(row) + row.fixed));
      duals += row.cost * row.dual * (1 - row.target * row.fixed - softness_ / 2 * row.dual);
    }
  }
  const double objective = lacking + square / 2, bound = duals - norm / 2;
  last_.loss = problem_.l2 * lacking;
  last_.objective = problem_.l2 * objective;
  const double whole = whole_ > 0 ? whole_ : objective;
  last_.gap = whole > 0 ? std::max(objective - bound, 0.0) / whole : 0;
  last_.converged = last_.gap <= problem_.tolerance;
}

DualDescent::Step DualDescent::step(const std::function<void()>& look) {
  if (!measured_) measure();
  measured_ = true;
  const double before = last_.gap, wanted = std::max(problem_.tolerance, kFall * before);
  imbalance_ = fixed_imbalance_;
  dual_ = 0;
  double square = 0, visited = 0, estimated = kMargin * wanted;
  for (const Row& row : rows_) {
    imbalance_ += row.cost * row.dual * row.target;
    dual_ += row.cost * row.dual * (1 - row.target * row.fixed - softness_ / 2 * row.dual);
  }
  for (std::size_t i = 0; i < problem_.features; ++i) square += w_[i] * w_[i];
  dual_ -= square / 2;
  // no state that duals and bias do not give: a training that goes on from them takes the same steps
  random_ = problem_.seed ^ std::bit_cast<std::uint64_t>(dual_);
  std::iota(order_.begin(), order_.end(), 0U);
  center_ = w_.back() - strength_ * imbalance_;
  const double most = kMostPasses * static_cast<double>(rows_.size());
  do {
    active_ = rows_.size();
    highest_ = HUGE_VAL;
    lowest_ = -HUGE_VAL;
    for (bool is_near = false; visited < most && !is_near;) {
      look();
      visited += static_cast<double>(active_) + 1;
      const double gap = pass();
      is_near = gap <= estimated * (whole_ > 0 ? whole_ : dual_ + gap);
    }
    measure();
    estimated /= 2;
  } while (last_.gap > wanted && visited < most);
  last_.slow = !last_.converged && last_.gap > kEnough * before;
  return last_;
}

void DualDescent::write_duals(std::span<double> out) const {
  std::size_t place = 0;
  for (std::size_t i = 0; i < problem_.chosen.size(); ++i) {
    const bool counts = problem_.row_weights.empty() || problem_.row_weights[problem_.chosen[i]] != 0;
    out[i] = counts ? rows_[place++].dual : 0;
  }
}

void DualDescent::write_balanced(std::span<double> out) const {
  write_duals(out);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] *= kept_[problem_.targets[problem_.chosen[i]] > 0];
}

void DualDescent::restore(std::span<const double> duals, double bias) {
  std::fill(w_.begin(), w_.end(), 0.0);
  std::size_t place = 0;
  for (std::size_t i = 0; i < problem_.chosen.size(); ++i) {
    if (!problem_.row_weights.empty() && problem_.row_weights[problem_.chosen[i]] == 0) continue;
    Row& row = rows_[place++];
    row.dual = duals[i];
    if (row.dual > 0) add(row, row.cost * row.dual * row.target, w_);
  }
  w_.back() = bias;
  measured_ = false;
}

}  // namespace telegrad::linear
