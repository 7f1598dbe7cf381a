#include "linear/newton.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <utility>

#include "base/check.hpp"
#include "kernels/row_products.hpp"
#include "linear/dual_descent.hpp"
#include "linear/rounding.hpp"

namespace telegrad::linear {
namespace {

using kernels::rounded;

constexpr std::size_t kMostDirect = 160;  // columns of a Hessian that is factorised
constexpr int kHalvings = 40;
constexpr double kSufficient = 0.01;         // of the fall that a step's slope promises
constexpr double kEnough = 0.25;              // of the mean gain of an iteration: conjugate gradients end below it
constexpr double kEnoughOfKinks = 0.03;       // the same for the squared hinge, whose curvature changes suddenly
constexpr double kFading = 0.8;              // of the largest gain by the next iteration: of uneven rows these go up and down
constexpr double kOfBound = 0.3;             // of the tolerance, by the bound of the quadratic model, where that may be the last
constexpr double kOfSmall = 1e-6;            // of that, for a softmax of few weights
constexpr double kCertain = 0.003;           // likewise without an l2, of the gain that the tolerance asks
constexpr double kFirstSmoothing = 2, kShrink = 0.5, kLeastSmoothing = 1e-9;
constexpr double kOfDescent = 4;             // in place of the smoothing: these are the duals of a descent by coordinates
constexpr double kOfFewRows = 8;             // likewise: of descents on few rows
constexpr double kInner = 0.2;               // of the gap, below which the steps' objective counts as minimised
constexpr double kExact = 0.1;               // of what a step begins with is enough: the rows at the kink change anyway
constexpr double kOfBias = 1e-4;  // curvature of the hinge's bias in steps, as rows may have none, by squares of values
constexpr double kRounding = 1e-13;          // of the objective: what its sums may have lost
constexpr std::size_t kMostNoise = 30;       // steps that win less than that
constexpr double kUniform = 256;             // times the least column's largest value: all columns are rounded alike
// Mean logarithms of how many times columns' largest values are larger than others: of all, or of one column, as the
// others may be of ones and zeros.
constexpr double kUneven = 6, kUnevenColumn = 12;

int exponent_of(double x) { return static_cast<int>(std::bit_cast<std::uint64_t>(x) >> 52); }

// A sum with the same bits in any order, of terms of which none is above `largest`, in two parts of their digits.
struct Sum {
  double high_magic = 0, low_magic = 0, high = 0, low = 0;

  Sum() = default;
  Sum(double largest, double rounding)
      : high_magic(rounding * power_of_two(largest)), low_magic(rounding * power_of_two(std::ldexp(high_magic, -52))) {}

  void add(double x) {
    const double most = rounded(x, high_magic);
    high += most;
    low += rounded(x - most, low_magic);
  }

  // term(i) of each i below count; the compiler may take several at once.
  template <class Term>
  void add_each(std::size_t count, const Term& term) {
    double highs[4] = {}, lows[4] = {};
    std::size_t i = 0;
    for (; i + 4 <= count; i += 4) {
      for (std::size_t k = 0; k < 4; ++k) {
        const double x = term(i + k), most = rounded(x, high_magic);
        highs[k] += most;
        lows[k] += rounded(x - most, low_magic);
      }
    }
    for (; i < count; ++i) add(term(i));
    high += (highs[0] + highs[1]) + (highs[2] + highs[3]);
    low += (lows[0] + lows[1]) + (lows[2] + lows[3]);
  }
};

}  // namespace

Newton::Newton(const Problem& problem, Team& team, Reduce reduce)
    : problem_(problem), team_(team), reduce_(std::move(reduce)) {
  TELEGRAD_CHECK(problem.loss != Loss::hinge || problem.l2 > 0);
  TELEGRAD_CHECK(problem.row_weights.empty() || problem.row_weights.size() == problem.targets.size());
  TELEGRAD_CHECK(problem.classes > 0 && (problem.classes == 1 || problem.loss == Loss::logistic));
  TELEGRAD_CHECK(problem.l1 == 0 || (problem.classes == 1 && problem.loss != Loss::hinge && !problem.split));
  if (problem_.total_features == 0) problem_.total_features = problem.features;
  const bool is_direct = classes() == 1 && problem_.total_features + 1 <= kMostDirect && !problem.split;
  TELEGRAD_CHECK(!problem.split || problem.counted.size() == problem.features);
  counted_.resize(problem.split ? weights() : 0);
  for (std::size_t i = 0; i < counted_.size(); ++i) counted_[i] = problem.counted[i / classes()];
  for (LargeVector<double>* vector : {&w_, &gradient_, &diagonal_, &step_, &residual_, &direction_}) {
    vector->resize(width());
  }
  product_.resize(width() + 4);  // with sums that travel along
  if (is_direct) begin_directly();
  for (std::vector<double>* vector : {&scores_, &moved_, &along_, &slopes_, &curvatures_}) {
    vector->resize(rows() * classes());
  }
  if (is_hinge() || problem.descends) {
    duals_.resize(rows() + 1);
    duals_.back() = kFirstSmoothing;
    if (problem.descends && direct_) begin_bounds();
    if (problem.descends && (!direct_ || uneven_)) {  // factors of uneven rows round
      descent_ = std::make_unique<DualDescent>(problem);
      duals_.back() = kOfDescent;
    }
  }
  moves_known_ = problem.l1 == 0 && (problem.loss == Loss::logistic || problem.loss == Loss::squared_error);
  places_.resize(problem.l1 > 0 ? problem.features : 0);
  parts_.resize(6 * team_.size());
  // equal shares of entries, so far as some rows can tell; which thread sums a feature changes no bit
  std::vector<std::uint32_t> seen;
  for (std::size_t i = 0; i < rows() && team_.size() > 1; i += rows() / 256 + 1) {
    const std::uint64_t row = problem.chosen[i];
    seen.insert(seen.end(), problem.rows.indices.begin() + static_cast<std::ptrdiff_t>(problem.rows.offsets[row]),
                problem.rows.indices.begin() + static_cast<std::ptrdiff_t>(problem.rows.offsets[row + 1]));
  }
  std::sort(seen.begin(), seen.end());
  for (std::size_t part = 0; part <= team_.size(); ++part) {
    const std::size_t place = seen.size() * part / team_.size();
    borders_.push_back(part == 0 ? 0 : place < seen.size() ? seen[place] : problem.features);
  }
}

Newton::~Newton() = default;

void Newton::begin_directly() {
  direct_ = true;
  hessian_.resize(width() * width());
  if (problem_.loss == Loss::squared_hinge) curved_.resize(rows());
}

// Rows for which descents are slow are so for conjugate gradients, too.
void Newton::end_descents() {
  descent_.reset();
  if (problem_.descends && width() <= kernels::kMostColumns) begin_directly();
}

// act(at), where at(score, target, dual) are a row's loss and its derivatives.
template <class Do>
void Newton::by_loss(const Do& act) const {
  switch (problem_.loss) {
    case Loss::logistic:
      return act([](double score, double target, double) -> At {
        const double margin = score * target, small = std::exp(-std::abs(margin)), part = 1 / (1 + small);
        const double value = std::log1p(small) + (margin < 0 ? -margin : 0);
        return {value, -target * (margin < 0 ? part : small * part), small * part * part};
      });
    case Loss::squared_hinge:
      return act([](double score, double target, double) -> At {
        const double lacking = 1 - score * target;
        if (lacking <= 0) return {};
        return {lacking * lacking, -2 * target * lacking, 2};
      });
    case Loss::squared_error:
      return act([](double score, double target, double) -> At {
        const double error = score - target;
        return {error * error / 2, error, 1};
      });
    case Loss::hinge: {
      const double h = duals_.back();
      return act([h](double score, double target, double dual) -> At {
        const double v = 1 - score * target + h * dual, less = h * dual * dual / 2;
        if (v <= 0) return {-less, 0, 0};
        if (v >= h) return {v - h / 2 - less, -target, 0};
        return {v * v / (2 * h) - less, -target * v / h, 1 / h};
      });
    }
  }
}

double Newton::score(std::size_t row, const double* w) const {
  const std::uint64_t begin = problem_.rows.offsets[row], end = problem_.rows.offsets[row + 1];
  const std::uint32_t* const indices = problem_.rows.indices.data();
  const float* const values = problem_.rows.values.data();
  double one = 0, other = 0;
  std::uint64_t i = begin;
  if (end - begin >= 2 && indices[end - 1] - indices[begin] == end - begin - 1) {
    const double* const dense = w + indices[begin] - begin;
    for (; i + 2 <= end; i += 2) {
      one += dense[i] * static_cast<double>(values[i]);
      other += dense[i + 1] * static_cast<double>(values[i + 1]);
    }
  } else {
    for (; i + 2 <= end; i += 2) {
      one += w[indices[i]] * static_cast<double>(values[i]);
      other += w[indices[i + 1]] * static_cast<double>(values[i + 1]);
    }
  }
  if (i < end) one += w[indices[i]] * static_cast<double>(values[i]);
  return one + other + w[problem_.features];
}

void Newton::score_row(std::size_t i, const double* w, double* out) const {
  const std::uint64_t row = problem_.chosen[i], end = problem_.rows.offsets[row + 1];
  if (classes() == 1) {
    *out = score(row, w);
    return;
  }
  std::copy(w + weights(), w + width(), out);
  for (std::uint64_t e = problem_.rows.offsets[row]; e < end; ++e) {
    const double* const own = w + problem_.rows.indices[e] * classes();
    const auto value = static_cast<double>(problem_.rows.values[e]);
    for (std::size_t k = 0; k < classes(); ++k) out[k] += own[k] * value;
  }
}

void Newton::score_rows(const LargeVector<double>& w, std::vector<double>& out) {
  team_.run([&](std::size_t part) {
    const std::size_t end = rows() * (part + 1) / team_.size();
    for (std::size_t i = rows() * part / team_.size(); i < end; ++i) score_row(i, w.data(), &out[i * classes()]);
  });
}

// What bounds follow from; also the sum of weights. Called by all ranks, in the first step.
void Newton::begin_bounds() {
  if (bounded_) return;
  LargeVector<double> found(problem_.features + 3);
  double& heaviest = found[problem_.features];
  double& farthest = found[problem_.features + 1];
  double& most_entries = found[problem_.features + 2];
  for (const std::uint64_t row : problem_.chosen) {
    const std::uint64_t begin = problem_.rows.offsets[row], end = problem_.rows.offsets[row + 1];
    for (std::uint64_t e = begin; e < end; ++e) {
      double& largest = found[problem_.rows.indices[e]];
      largest = std::max(largest, std::abs(static_cast<double>(problem_.rows.values[e])));
    }
    heaviest = std::max(heaviest, weight(row));
    farthest = std::max(farthest, std::abs(static_cast<double>(problem_.targets[row])));
    most_entries = std::max(most_entries, static_cast<double>(end - begin));
  }
  reduce(found, 1, Over::largest);
  heaviest_ = heaviest;
  farthest_ = farthest;
  most_entries_ = most_entries;
  const std::size_t terms = std::max(problem_.total_rows, problem_.total_features + 1) * classes();
  rounding_ = 1.5 * power_of_two(2 * static_cast<double>(std::max<std::size_t>(problem_.total_rows, 1)));
  product_rounding_ = 1.5 * power_of_two(2 * static_cast<double>(terms));
  double spread[2] = {};  // the largest, and the inverse of the least
  for (std::size_t i = 0; i < problem_.features; ++i) {
    if (found[i] == 0) continue;
    spread[0] = std::max(spread[0], found[i]);
    spread[1] = std::max(spread[1], 1 / found[i]);
  }
  if (problem_.split) reduce(spread, 0, Over::largest);
  uniform_ = !(spread[0] * spread[1] > kUniform);
  column_ = power_of_two(spread[0]);
  of_bias_ = kOfBias / std::max(column_ * column_, 1.0);
  largest_.resize(problem_.features);
  for (std::size_t i = 0; i < problem_.features; ++i) largest_[i] = uniform_ ? column_ : power_of_two(found[i]);
  Sum sum(heaviest_, rounding_);
  std::int64_t entries = 0, smaller = 0;
  int most_times = 0;
  for (const std::uint64_t row : problem_.chosen) {
    sum.add(weight(row));
    for (std::uint64_t e = problem_.rows.offsets[row]; e < problem_.rows.offsets[row + 1]; ++e) {
      const double value = std::abs(static_cast<double>(problem_.rows.values[e]));
      if (value == 0) continue;
      const int times = exponent_of(largest_[problem_.rows.indices[e]]) - exponent_of(value);
      ++entries;
      smaller += times;
      most_times = std::max(most_times, times);
    }
  }
  double every[5] = {sum.high, sum.low, static_cast<double>(entries), static_cast<double>(smaller),
                     most_times > kUnevenColumn ? 1.0 : 0.0};
  reduce(every, 0);
  total_weight_ = every[0] + every[1];
  uneven_ = every[3] > kUneven * every[2] || (every[4] > 0 && has_uneven_column());
  tail_ = std::ldexp(rounding_ / 1.5, -52);
  rest_.resize(uneven_ ? width() : 0);
  bounded_ = true;
}

// Called by all ranks.
bool Newton::has_uneven_column() {
  LargeVector<double> beyond(problem_.features + 1);  // one more, so that there is something to reduce
  for (const std::uint64_t row : problem_.chosen) {
    for (std::uint64_t e = problem_.rows.offsets[row]; e < problem_.rows.offsets[row + 1]; ++e) {
      const double value = std::abs(static_cast<double>(problem_.rows.values[e]));
      const std::uint32_t feature = problem_.rows.indices[e];
      if (value > 0) beyond[feature] += exponent_of(largest_[feature]) - exponent_of(value) - kUnevenColumn;
    }
  }
  reduce(beyond, 1);
  double found[1] = {std::any_of(beyond.begin(), beyond.end(), [](double one) { return one > 0; }) ? 1.0 : 0.0};
  reduce(found, 0, Over::largest);
  return found[0] > 0;
}

// The largest weight, times its column's largest value.
double Newton::scaled(const LargeVector<double>& w) const {
  double most = 0;
  for (std::size_t i = 0; i < weights(); ++i) most = std::max(most, std::abs(w[i]) * largest_[i / classes()]);
  return most;
}

// Of any row's score there. `scaled`: that of all ranks.
double Newton::bound_of_scores(const LargeVector<double>& w, double scaled) const {
  double bias = 0;
  for (std::size_t k = weights(); k < width(); ++k) bias = std::max(bias, std::abs(w[k]));
  return most_entries_ * scaled + bias;
}

// Σ over the features of all ranks of each of terms(i, out), with the same bits for any number of ranks. `largest`: numbers
// of which the largest of all ranks is asked, too.
template <std::size_t kSums, class Terms>
void Newton::sum_features(const Terms& terms, double (&sums)[kSums], std::span<double> largest) {
  double most[kSums + 2] = {};
  std::array<double, kSums> found;
  for (std::size_t i = 0; i < weights(); ++i) {
    terms(i, found);
    for (std::size_t k = 0; k < kSums; ++k) most[k] = std::max(most[k], std::abs(found[k]));
  }
  std::copy(largest.begin(), largest.end(), most + kSums);
  if (problem_.split) reduce({most, kSums + largest.size()}, 0, Over::largest);
  std::copy(most + kSums, most + kSums + largest.size(), largest.begin());
  Sum each[kSums];
  for (std::size_t k = 0; k < kSums; ++k) each[k] = Sum(most[k], product_rounding_);
  for (std::size_t i = 0; i < weights(); ++i) {
    if (problem_.split && counted_[i] == 0) continue;
    terms(i, found);
    for (std::size_t k = 0; k < kSums; ++k) each[k].add(found[k]);
  }
  double both[2 * kSums];
  for (std::size_t k = 0; k < kSums; ++k) {
    both[2 * k] = each[k].high;
    both[2 * k + 1] = each[k].low;
  }
  if (problem_.split) reduce(both, 0);
  for (std::size_t k = 0; k < kSums; ++k) sums[k] = both[2 * k] + both[2 * k + 1];
}

// Of any row's slope, and curvature, times its weight.
double Newton::bound_of_slopes() const {
  if (problem_.loss == Loss::squared_hinge) return heaviest_ * 2 * (1 + score_bound_);
  return heaviest_ * (problem_.loss == Loss::squared_error ? farthest_ + score_bound_ : 1);
}

double Newton::bound_of_curvatures() const {
  if (problem_.loss == Loss::squared_hinge) return 2 * heaviest_;
  return heaviest_ * (is_hinge() ? 1 / duals_.back() : 1);
}

// act(magic), where rounded(x, magic(feature)) is for terms of at most `largest` times a value, or its square, of the column.
template <class Do>
void Newton::by_rounding(double largest, bool squared, const Do& act) const {
  const double magic = rounding_ * power_of_two(largest);
  if (uniform_) {
    const double same = magic * column_ * (squared ? column_ : 1);
    act([same](std::size_t) { return same; });
  } else if (squared) {
    act([magic, this](std::size_t feature) { return magic * (largest_[feature] * largest_[feature]); });
  } else {
    act([magic, this](std::size_t feature) { return magic * largest_[feature]; });
  }
}

// out[feature] = Σ by_row·value, or ·value²; behind the features that of the bias. `largest`: of by_row.
void Newton::sum_columns(const std::vector<double>& by_row, bool squared, double largest, double* out) {
  const std::uint32_t* const indices = problem_.rows.indices.data();
  const float* const values = problem_.rows.values.data();
  std::fill(out, out + width(), 0.0);
  std::fill(rest_.begin(), rest_.end(), 0.0);
  by_rounding(largest, squared, [&](const auto& magic) {
    team_.run([&](std::size_t part) {
      const std::size_t first = borders_[part], last = borders_[part + 1];
      const bool all = team_.size() == 1;
      for (std::size_t i = 0; i < rows(); ++i) {
        const double* const factors = &by_row[i * classes()];
        if (classes() == 1 && *factors == 0) continue;
        const std::uint64_t row = problem_.chosen[i];
        std::uint64_t begin = problem_.rows.offsets[row], end = problem_.rows.offsets[row + 1];
        if (!all) {
          begin = static_cast<std::uint64_t>(std::lower_bound(indices + begin, indices + end, first) - indices);
          end = static_cast<std::uint64_t>(std::lower_bound(indices + begin, indices + end, last) - indices);
        }
        if (classes() > 1 || uneven_) {
          for (std::uint64_t e = begin; e < end; ++e) {
            const auto value = static_cast<double>(values[e]);
            const double term = squared ? value * value : value, own = magic(indices[e]);
            for (std::size_t k = 0; k < classes(); ++k) add(factors[k] * term, own, out, indices[e] * classes() + k);
          }
        } else if (squared) {
          for (std::uint64_t e = begin; e < end; ++e) {
            const auto value = static_cast<double>(values[e]);
            out[indices[e]] += rounded(*factors * value * value, magic(indices[e]));
          }
        } else {
          for (std::uint64_t e = begin; e < end; ++e) {
            out[indices[e]] += rounded(*factors * static_cast<double>(values[e]), magic(indices[e]));
          }
        }
      }
    });
  });
  if (!problem_.with_bias) return;
  const double magic = rounding_ * power_of_two(largest);
  for (std::size_t i = 0; i < by_row.size(); ++i) add(by_row[i], magic, out, weights() + i % classes());
}

// Over ranks; of vectors that sum_columns() made.
void Newton::reduce_columns(std::span<double> numbers) {
  reduce(numbers, classes());
  if (!uneven_) return;
  reduce(rest_, classes());
  for (std::size_t i = 0; i < width(); ++i) numbers[i] += rest_[i];
}

void Newton::reduce(std::span<double> numbers, std::size_t of_feature, Over over) {
  reduce_(numbers, of_feature, over);
  ++sums_;
}

// penalty_ and score_bound_, of w_.
void Newton::measure_weights() {
  double square[1], most[1] = {scaled(w_)};
  sum_features([this](std::size_t i, auto& out) { out[0] = w_[i] * w_[i]; }, square, most);
  penalty_ = problem_.l2 / 2 * square[0] + (problem_.l1 > 0 ? problem_.l1 * absolute(0) : 0);
  score_bound_ = bound_of_scores(w_, most[0]);
}

// A row's loss there; slopes_ and curvatures_, which are the weighted chances of the classes, then are those there.
double Newton::softmax(std::size_t i, double part) {
  const std::size_t first = i * classes();
  const auto own = static_cast<std::size_t>(problem_.targets[problem_.chosen[i]]);
  const double weight = this->weight(problem_.chosen[i]);
  double* const chances = &curvatures_[first];
  double highest = -HUGE_VAL, sum = 0;
  for (std::size_t k = 0; k < classes(); ++k) {
    chances[k] = part == 0 ? scores_[first + k] : scores_[first + k] + part * moved_[first + k];
    highest = std::max(highest, chances[k]);
  }
  const double of_own = highest - chances[own];
  for (std::size_t k = 0; k < classes(); ++k) sum += chances[k] = std::exp(chances[k] - highest);
  for (std::size_t k = 0; k < classes(); ++k) {
    chances[k] *= weight / sum;
    slopes_[first + k] = chances[k];
  }
  slopes_[first + own] -= weight;
  return std::log(sum) + of_own;
}

// The mean losses there; slopes_ and curvatures_ then are those there.
Newton::Value Newton::evaluate(double part) {
  const double scores = score_bound_ + part * moved_bound_;
  double largest = 2 * scores + static_cast<double>(classes());  // of a loss
  if (problem_.loss == Loss::squared_hinge || problem_.loss == Loss::squared_error) {
    largest = (scores + farthest_) * (scores + farthest_);
  } else if (is_hinge()) {
    largest = 1 + scores + 2 * duals_.back();
  }
  const Sum nothing(heaviest_ * largest, rounding_), none(heaviest_, rounding_);
  by_loss([&](const auto& at) {
    team_.run([&](std::size_t own) {
      Sum smoothed = nothing, of_loss = nothing, of_duals = none;
      for (std::size_t i = rows() * own / team_.size(); i < rows() * (own + 1) / team_.size(); ++i) {
        const std::uint64_t row = problem_.chosen[i];
        const double weight = this->weight(row);
        if (classes() > 1) {
          smoothed.add(weight * softmax(i, part));
          continue;
        }
        const double score = part == 0 ? scores_[i] : scores_[i] + part * moved_[i];
        const auto target = static_cast<double>(problem_.targets[row]);
        const At found = at(score, target, is_hinge() ? duals_[i] : 0.0);
        smoothed.add(weight * found.value);
        slopes_[i] = weight * found.slope;
        curvatures_[i] = weight * found.curvature;
        if (is_hinge()) {
          of_loss.add(weight * std::max(0.0, 1 - score * target));
          of_duals.add(weight * std::abs(found.slope));
        }
      }
      double* const out = &parts_[6 * own];
      const Sum every[] = {smoothed, is_hinge() ? of_loss : smoothed, of_duals};
      for (std::size_t k = 0; k < 3; ++k) {
        out[2 * k] = every[k].high;
        out[2 * k + 1] = every[k].low;
      }
    });
  });
  double sums[6] = {};
  for (std::size_t i = 0; i < parts_.size(); ++i) sums[i % 6] += parts_[i];
  reduce(sums, 0);
  for (std::size_t k = 0; k < 3; ++k) sums[k] = (sums[2 * k] + sums[2 * k + 1]) / total_weight_;
  return {sums[0], sums[1], sums[2]};
}

void Newton::begin() {
  if (begun_) return;
  has_gradient_ = false;
  begin_bounds();
  measure_weights();
  score_rows(w_, scores_);
  const Value value = evaluate(0);
  smoothed_ = value.smoothed;
  loss_ = value.plain;
  weighted_duals_ = value.duals;
  if (is_hinge()) {
    best_ = w_;
    best_penalty_ = penalty_;
    best_value_ = loss_ + penalty_;
    bound_ = 0;
  }
  begun_ = true;
}

void Newton::find_gradient() {
  if (std::exchange(has_gradient_, false)) return;
  sum_columns(slopes_, false, bound_of_slopes(), gradient_.data());
  reduce_columns(gradient_);
  for (std::size_t i = 0; i < width(); ++i) {
    gradient_[i] = gradient_[i] / total_weight_ + (i < weights() ? problem_.l2 * w_[i] : 0);
  }
}

// A step of the descent by coordinates. From one that is slow the steps after it go on by Newton's method.
Newton::Step Newton::descend() {
  const DualDescent::Step found = descent_->step([&] { reduce_({}, 0, Over::sum); });
  w_ = descent_->weights();
  descent_->write_duals(duals_);
  if (found.slow) {
    duals_.back() = std::clamp(found.gap, kLeastSmoothing, kFirstSmoothing);
    end_descents();
  }
  return {.loss = found.loss, .objective = found.objective, .gap = found.gap, .sums = 0, .converged = found.converged,
          .stuck = false};
}

Newton::Step Newton::step(bool last) {
  if (descent_) return descend();
  begin();
  sums_ = iterations_ = 0;
  if (problem_.l1 > 0) return step_with_l1();
  find_gradient();
  Step done;
  if (is_hinge()) {
    move_duals(done);
    if (done.converged) return done;
  }
  taken_ = false;
  const double predicted = solve();
  const double before = smoothed_ + penalty_;
  done.stuck = !(search() > 0);
  if (done.stuck) evaluate(0);  // slopes_ are of a step that was tried
  done.loss = loss_;
  done.objective = loss_ + penalty_;
  if (is_hinge()) {
    keep_best();
    done.objective = best_value_;
    done.loss = best_value_ - best_penalty_;
    if (done.stuck && duals_.back() > kLeastSmoothing) {
      minimised_ = true;
      done.stuck = false;
    }
  } else {
    done.gap = before > 0 ? predicted / before : 0;
    done.converged = done.gap <= problem_.tolerance;
    if ((done.converged || done.stuck || last) && problem_.l2 > 0) prove(done);
  }
  done.sums = sums_;
  done.iterations = iterations_;
  return done;
}

// Replaces the estimate of the gap by its bound. The next step, if there is one, has its gradient then.
void Newton::prove(Step& done) {
  find_gradient();
  has_gradient_ = true;
  const double most = done.objective > 0 ? most_to_win(gradient_) : 0;  // no loss is below 0
  done.converged = (done.converged || done.stuck || most == 0) && most <= problem_.tolerance * done.objective;
  done.gap = done.objective > 0 ? std::min(most / done.objective, 1.0) : 0;
  done.stuck = done.stuck && !done.converged;
}

// By how much the objective can be above the optimum where it has this gradient: its curvature along weights is at least l2,
// and the best biases are taken to be no more than 1 + |bias| away.
double Newton::most_to_win(const LargeVector<double>& gradient) {
  double square[1];
  sum_features([&](std::size_t i, auto& out) { out[0] = gradient[i] * gradient[i]; }, square);
  double most = square[0] / (2 * problem_.l2);
  for (std::size_t k = weights(); k < width(); ++k) most += std::abs(gradient[k]) * (1 + std::abs(w_[k]));
  return most;
}

void Newton::keep_best() {
  const double value = loss_ + penalty_;
  if (value >= best_value_) return;
  best_value_ = value;
  best_penalty_ = penalty_;
  best_ = w_;
}

// The gap between both bounds of the hinge's objective. Once that of the smoothed one is a small part of it, its slopes are
// the next dual variables.
void Newton::move_duals(Step& done) {
  double inner = 0;
  const double bound = dual_bound(inner);
  bound_ = std::max(bound_, bound);
  done.gap = best_value_ > 0 ? std::max(best_value_ - bound_, 0.0) / best_value_ : 0;
  done.objective = best_value_;
  done.loss = best_value_ - best_penalty_;
  done.converged = done.gap <= problem_.tolerance;
  done.sums = sums_;
  if (done.converged) return;
  if (!minimised_ && inner > kInner * (loss_ + penalty_ - bound)) return;
  next_duals();
  const Value changed = evaluate(0);
  smoothed_ = changed.smoothed;
  weighted_duals_ = changed.duals;
  find_gradient();
}

double Newton::next_dual(std::size_t i) const {
  const double target = static_cast<double>(problem_.targets[problem_.chosen[i]]);
  return std::clamp((1 - scores_[i] * target) / duals_.back() + duals_[i], 0.0, 1.0);
}

void Newton::next_duals() {
  minimised_ = false;
  double& h = duals_.back();
  for (std::size_t i = 0; i < rows(); ++i) duals_[i] = next_dual(i);
  h = std::max(h * kShrink, kLeastSmoothing);
}

// The dual objective of the slopes at w_. With them weights are w_ − gradient/l2; a bias has no penalty, so that theirs must
// sum to 0, which those of one class are scaled down for. `inner`: what the slopes of w_ may still cost.
double Newton::dual_bound(double& inner) {
  double squares[2];
  sum_features(
      [this](std::size_t i, auto& out) {
        const double one = problem_.l2 * w_[i] - gradient_[i];
        out[0] = one * one;
        out[1] = gradient_[i] * gradient_[i];
      },
      squares);
  const double slope = gradient_.back(), apart = weighted_duals_ - squares[0] / (2 * problem_.l2) + slope * w_.back();
  inner = squares[1] / (2 * problem_.l2);
  if (slope == 0) return apart;
  std::vector<double> duals(rows());
  for (std::size_t i = 0; i < rows(); ++i) duals[i] = next_dual(i);
  const double bound = balanced_bound(duals);
  inner += std::max(apart - bound, 0.0);
  return bound;
}

// The dual objective of these, those of one class scaled down until the slopes of both sum to 0.
double Newton::balanced_bound(std::span<const double> duals) {
  Sum of_class[2] = {{heaviest_, rounding_}, {heaviest_, rounding_}};
  const auto is_positive = [this](std::size_t i) { return problem_.targets[problem_.chosen[i]] > 0; };
  for (std::size_t i = 0; i < rows(); ++i) of_class[is_positive(i)].add(weight(problem_.chosen[i]) * duals[i]);
  double both[4] = {of_class[0].high, of_class[0].low, of_class[1].high, of_class[1].low};
  reduce(both, 0);
  const double negative = both[0] + both[1], positive = both[2] + both[3], least = std::min(negative, positive);
  if (least <= 0) return 0;
  std::vector<double> scaled(duals.begin(), duals.end());
  for (std::size_t i = 0; i < rows(); ++i) scaled[i] *= least / (is_positive(i) ? positive : negative);
  sum_duals(scaled, {}, product_.data());
  double square[1];
  sum_features([this](std::size_t i, auto& out) { out[0] = product_[i] * product_[i]; }, square);
  return 2 * least / total_weight_ - problem_.l2 / 2 * square[0];
}

// The largest of 1, 1/2, … times the step that makes the objective fall as it promises, taken; 0 if none does.
double Newton::search() {
  double sums[3], most[1] = {scaled(step_)};
  sum_features(
      [this](std::size_t i, auto& out) {
        out[0] = gradient_[i] * step_[i];
        out[1] = step_[i] * step_[i];
        out[2] = w_[i] * step_[i];
      },
      sums, most);
  double slope = sums[0];
  for (std::size_t k = weights(); k < width(); ++k) slope += gradient_[k] * step_[k];
  const double before = problem_.l1 > 0 ? absolute(0) : 0;
  if (problem_.l1 > 0) slope += problem_.l1 * (absolute(1) - before);
  if (!(slope < 0)) return 0;
  if (!moves_known_) score_rows(step_, moved_);
  moved_bound_ = bound_of_scores(step_, most[0]);
  double part = 1;
  for (int halving = 0; halving < kHalvings; ++halving, part /= 2) {
    const Value value = evaluate(part);
    double change = value.smoothed - smoothed_ + problem_.l2 * part * (sums[2] + part / 2 * sums[1]);
    if (problem_.l1 > 0) change += problem_.l1 * (absolute(part) - before);
    // with an L1 penalty a slope may still be above the tolerance where rounding hides what a step wins
    const bool is_noise = problem_.l1 > 0 && std::abs(slope) <= kRounding * (smoothed_ + penalty_);
    if (is_noise && ++noise_ > kMostNoise) return 0;
    if (!is_noise && !(change <= kSufficient * part * slope)) continue;
    for (std::size_t i = 0; i < width(); ++i) w_[i] += part * step_[i];
    for (std::size_t i = 0; i < scores_.size(); ++i) scores_[i] += part * moved_[i];
    measure_weights();
    smoothed_ = value.smoothed;
    loss_ = value.plain;
    weighted_duals_ = value.duals;
    return part;
  }
  return 0;
}

// step_, and by how much it makes the quadratic model of the objective fall.
double Newton::solve() {
  double predicted = 0;
  if (direct_ && solve_directly(predicted)) {
    if (moves_known_) score_rows(step_, moved_);
    return predicted;
  }
  return solve_iteratively();
}

double Newton::solve_iteratively() {
  if (classes() == 1) {
    sum_columns(curvatures_, true, bound_of_curvatures(), diagonal_.data());
  } else {
    weighted_.resize(curvatures_.size());
    for (std::size_t i = 0; i < curvatures_.size(); ++i) {
      const double weight = this->weight(problem_.chosen[i / classes()]), chance = curvatures_[i];
      weighted_[i] = weight > 0 ? chance * (1 - chance / weight) : 0;
    }
    sum_columns(weighted_, true, bound_of_curvatures(), diagonal_.data());
  }
  reduce_columns(diagonal_);
  for (std::size_t i = 0; i < width(); ++i) {
    double found = diagonal_[i] / total_weight_ + (i < weights() ? problem_.l2 : 0);
    if (i == problem_.features && is_hinge() && problem_.with_bias) found += of_bias_;
    diagonal_[i] = found > 0 ? 1 / found : 0;
  }
  double most[2] = {};  // elements of the direction, and the same times their columns' largest values
  for (std::size_t i = 0; i < width(); ++i) {
    step_[i] = 0;
    residual_[i] = -gradient_[i];
    direction_[i] = diagonal_[i] * residual_[i];
    if (i < weights()) most[0] = std::max(most[0], std::abs(direction_[i]));
  }
  most[1] = scaled(direction_);
  double first[1];
  sum_features([this](std::size_t i, auto& out) { out[0] = residual_[i] * direction_[i]; }, first, most);
  double product = first[0];
  for (std::size_t k = weights(); k < width(); ++k) product += residual_[k] * direction_[k];
  if (moves_known_) std::fill(moved_.begin(), moved_.end(), 0.0);
  const double objective = smoothed_ + penalty_;
  const bool quadratic = problem_.loss == Loss::squared_error;
  const double ends_at = problem_.loss == Loss::squared_hinge ? kEnoughOfKinks : kEnough;
  const double fading = uneven_ && problem_.loss == Loss::squared_hinge ? kFading : 0;
  double predicted = 0, recent = 0, enough = 0;  // the latter of the hinge's dual bound, see move_duals()
  if (is_hinge()) {
    dual_bound(enough);
    enough = std::max(kExact * enough, kInner / 2 * std::max(problem_.tolerance * objective, best_value_ - bound_));
  }
  // a small softmax ends as near the optimum as a direct step would: rows and weights that mean the same find the same
  const bool is_small = classes() > 1 && (problem_.total_features + 1) * classes() <= kMostDirect;
  const double of_bound = kOfBound * (is_small ? kOfSmall : 1);
  const std::size_t most_iterations = std::max<std::size_t>(problem_.total_features * classes() + classes(), 10) * 2;
  std::vector<double> travelling(2 + 2 * problem_.ranks);
  for (std::size_t iteration = 1; iteration <= most_iterations && product > 0; ++iteration) {
    const double curved = multiply(most[0], most[1]);
    iterations_ = iteration;
    if (!(curved > 0)) break;
    const double length = product / curved, gain = length * product / 2;
    if (moves_known_) {
      for (std::size_t i = 0; i < moved_.size(); ++i) moved_[i] += length * along_[i];
    }
    // With scales by the diagonal no eigenvalue is above twice a row's entries, which bounds the next residual.
    const double grown = 1 + std::sqrt(2 * (most_entries_ + 1) * length);
    Sum next(2 * product * grown * grown, product_rounding_);
    double largest[2] = {};
    for (std::size_t i = 0; i < width(); ++i) {
      step_[i] += length * direction_[i];
      residual_[i] -= length * product_[i];
    }
    for (std::size_t i = 0; i < weights(); ++i) largest[0] = std::max(largest[0], std::abs(diagonal_[i] * residual_[i]));
    for (std::size_t i = 0; i < weights() && !uniform_; ++i) {
      largest[1] = std::max(largest[1], std::abs(diagonal_[i] * residual_[i]) * largest_[i / classes()]);
    }
    if (problem_.split) {
      next.add_each(weights(), [&](std::size_t i) { return residual_[i] * (diagonal_[i] * residual_[i]) * counted_[i]; });
    } else {
      next.add_each(weights(), [&](std::size_t i) { return residual_[i] * (diagonal_[i] * residual_[i]); });
    }
    predicted += gain;
    recent = std::max(fading * recent, gain);
    // a small gain may be that of a few iterations alone, and no sign of the optimum: the residual tells, if there is an l2
    const bool doubtful = quadratic || predicted <= problem_.tolerance * objective;
    const double certain = problem_.tolerance * std::max(objective - predicted, 0.0);
    if (doubtful && problem_.l2 > 0) {
      if (most_to_win(residual_) <= (is_hinge() ? enough : of_bound * certain)) break;
    } else if (static_cast<double>(iteration) * recent <= (doubtful ? kCertain * certain : ends_at * predicted)) {
      break;
    }
    double sum = next.high + next.low;
    if (problem_.split) {  // each rank's largest numbers have a place of their own in these sums
      std::fill(travelling.begin(), travelling.end(), 0.0);
      travelling[0] = next.high;
      travelling[1] = next.low;
      std::copy(largest, largest + 2, travelling.begin() + static_cast<std::ptrdiff_t>(2 + 2 * problem_.rank));
      reduce(travelling, 0);
      sum = travelling[0] + travelling[1];
      for (std::size_t i = 2; i < travelling.size(); ++i) largest[i % 2] = std::max(largest[i % 2], travelling[i]);
    }
    if (uniform_) largest[1] = largest[0] * column_;
    for (std::size_t k = weights(); k < width(); ++k) sum += residual_[k] * residual_[k] * diagonal_[k];
    const double kept = sum / product;
    product = sum;
    for (std::size_t k = 0; k < 2; ++k) most[k] = largest[k] + kept * most[k];
    for (std::size_t i = 0; i < width(); ++i) direction_[i] = diagonal_[i] * residual_[i] + kept * direction_[i];
  }
  return predicted;
}

// product_ = Hessian · direction_; the result is their inner product. `most`, `most_scaled`: elements of direction_, at most.
double Newton::multiply(double most, double most_scaled) {
  const double of_scores = bound_of_scores(direction_, most_scaled);
  const double largest = (classes() > 1 ? 2 : 1) * bound_of_curvatures() * of_scores;
  Sum curved(largest * of_scores, product_rounding_), square(most * most, product_rounding_);
  if (team_.size() > 1 || classes() > 1 || uneven_) {
    score_rows(direction_, along_);
    weighted_.resize(along_.size());
    for (std::size_t i = 0; i < rows(); ++i) {
      const double* const own = &curvatures_[i * classes()];
      const double weight = this->weight(problem_.chosen[i]);
      double mean = 0;
      for (std::size_t k = 0; classes() > 1 && k < classes(); ++k) mean += own[k] * along_[i * classes() + k];
      if (weight > 0) mean /= weight;
      for (std::size_t k = 0; k < classes(); ++k) {
        const double one = along_[i * classes() + k];
        weighted_[i * classes() + k] = own[k] * (one - mean);
        curved.add(weighted_[i * classes() + k] * one);
      }
    }
    sum_columns(weighted_, false, largest, product_.data());
  } else {
    const std::uint32_t* const indices = problem_.rows.indices.data();
    const float* const values = problem_.rows.values.data();
    double* const sums = product_.data();
    std::fill(product_.begin(), product_.end(), 0.0);
    double of_bias = 0;
    const double bias_magic = rounding_ * power_of_two(largest);
    by_rounding(largest, false, [&](const auto& magic) {
      for (std::size_t i = 0; i < rows(); ++i) {
        const std::uint64_t row = problem_.chosen[i];
        if (!moves_known_ && curvatures_[i] == 0) continue;
        along_[i] = score(row, direction_.data());
        const double factor = along_[i] * curvatures_[i];
        if (factor == 0) continue;
        curved.add(factor * along_[i]);
        of_bias += rounded(factor, bias_magic);
        const std::uint64_t end = problem_.rows.offsets[row + 1];
        for (std::uint64_t e = problem_.rows.offsets[row]; e < end; ++e) {
          sums[indices[e]] += rounded(factor * static_cast<double>(values[e]), magic(indices[e]));
        }
      }
    });
    sums[problem_.features] = problem_.with_bias ? of_bias : 0;
  }
  if (problem_.split) {
    square.add_each(weights(), [&](std::size_t i) { return direction_[i] * direction_[i] * counted_[i]; });
  } else {
    square.add_each(weights(), [&](std::size_t i) { return direction_[i] * direction_[i]; });
  }
  double* const along = product_.data() + width();
  along[0] = curved.high;
  along[1] = curved.low;
  along[2] = problem_.split ? square.high : 0;
  along[3] = problem_.split ? square.low : 0;
  reduce_columns(product_);
  double inner = (along[0] + along[1]) / total_weight_;
  inner += problem_.l2 * (problem_.split ? along[2] + along[3] : square.high + square.low);
  for (std::size_t i = 0; i < width(); ++i) {
    product_[i] = product_[i] / total_weight_ + (i < weights() ? problem_.l2 * direction_[i] : 0);
  }
  if (is_hinge() && problem_.with_bias) {
    product_[width() - 1] += of_bias_ * direction_.back();
    inner += of_bias_ * direction_.back() * direction_.back();
  }
  return inner;
}

Newton::Step Newton::take(std::span<const double> duals) {
  begin_bounds();
  sums_ = 0;
  std::copy(duals.begin(), duals.end(), duals_.begin());
  duals_.back() = kOfFewRows;
  sum_duals(duals, {}, w_.data());
  w_.back() = 0;
  score_rows(w_, scores_);
  const double bias = problem_.with_bias ? best_bias() : 0;
  w_.back() = bias;
  for (double& one : scores_) one += bias;
  measure_weights();
  const Value value = evaluate(0);
  smoothed_ = value.smoothed;
  loss_ = value.plain;
  weighted_duals_ = value.duals;
  if (!begun_) {
    best_value_ = HUGE_VAL;
    bound_ = 0;
  }
  begun_ = true;
  keep_best();
  if (problem_.with_bias) {
    bound_ = std::max(bound_, balanced_bound(duals));
  } else {
    Sum all(heaviest_, rounding_);
    for (std::size_t i = 0; i < rows(); ++i) all.add(weight(problem_.chosen[i]) * duals[i]);
    double each[2] = {all.high, all.low};
    reduce(each, 0);
    bound_ = std::max(bound_, (each[0] + each[1]) / total_weight_ - penalty_);
  }
  Step done{.loss = best_value_ - best_penalty_, .objective = best_value_};
  done.gap = best_value_ > 0 ? std::max(best_value_ - bound_, 0.0) / best_value_ : 0;
  done.converged = done.gap <= problem_.tolerance;
  done.sums = sums_;
  minimised_ = false;
  taken_ = true;
  return done;
}

void Newton::restore(std::span<const float> weights, double bias, std::span<const double> duals) {
  TELEGRAD_CHECK(classes() == 1 && weights.size() == problem_.features && (duals.empty() || duals.size() == duals_.size()));
  for (std::size_t i = 0; i < weights.size(); ++i) w_[i] = static_cast<double>(weights[i]);
  w_.back() = bias;
  std::copy(duals.begin(), duals.end(), duals_.begin());
  if (descent_ && !duals.empty() && duals.back() == kOfDescent) {
    descent_->restore(duals, bias);
  } else {
    end_descents();
  }
  if (!duals_.empty() && !descent_ && duals_.back() == kOfDescent) duals_.back() = kFirstSmoothing;
  best_.clear();
  begun_ = false;
  taken_ = duals_.size() > 0 && duals_.back() == kOfFewRows;
}

}  // namespace telegrad::linear
