// What others take of Newton's steps: a model, and, for descents on few rows, other rows' part of the weights and the best bias.
#include <algorithm>
#include <cmath>

#include "base/check.hpp"
#include "linear/dual_descent.hpp"
#include "linear/newton.hpp"

namespace telegrad::linear {

void Newton::write_margins(std::span<double> duals, std::span<double> lacking) const {
  for (std::size_t i = 0; i < rows(); ++i) {
    lacking[i] = 1 - scores_[i] * static_cast<double>(problem_.targets[problem_.chosen[i]]);
    duals[i] = taken_ ? duals_[i] : next_dual(i);
  }
}

// The weights of these duals, but for those of some rows; behind them Σ weight·a·y.
void Newton::sum_duals(std::span<const double> duals, std::span<const std::uint8_t> without, double* out) {
  std::vector<double> slopes(rows());
  for (std::size_t i = 0; i < rows(); ++i) {
    const std::uint64_t row = problem_.chosen[i];
    const bool counts = without.empty() || without[i] == 0;
    slopes[i] = counts ? weight(row) * static_cast<double>(problem_.targets[row]) * duals[i] : 0;
  }
  sum_columns(slopes, false, heaviest_, out);
  reduce_columns({out, width()});
  for (std::size_t i = 0; i < weights(); ++i) out[i] /= total_weight_ * problem_.l2;
}

double Newton::fix(std::span<const std::uint8_t> moves, std::span<const double> duals, std::span<double> scores) {
  sum_duals(duals, moves, product_.data());
  const double imbalance = product_[weights()];
  product_[weights()] = 0;
  for (std::size_t i = 0; i < rows(); ++i) scores[i] = score(problem_.chosen[i], product_.data());
  return imbalance;
}

// Of the hinge, for scores_ that lack one: where the slope of all losses changes its sign, found in ever smaller ranges.
double Newton::best_bias() {
  constexpr std::size_t kParts = 64;
  constexpr int kPasses = 9;
  double range[1] = {};
  const auto kink = [&](std::size_t i) { return static_cast<double>(problem_.targets[problem_.chosen[i]]) - scores_[i]; };
  for (std::size_t i = 0; i < rows(); ++i) range[0] = std::max(range[0], std::abs(kink(i)));
  reduce(range, 0, Over::largest);
  double low = -range[0], size = 2 * range[0];
  for (int pass = 0; pass < kPasses; ++pass) {
    // the slope below is that of the positive rows whose kinks are not passed, against the negative ones that are
    double changes[kParts + 2] = {};
    for (std::size_t i = 0; i < rows(); ++i) {
      const double place = size > 0 ? (kink(i) - low) / size * kParts : 0, weight = this->weight(problem_.chosen[i]);
      const std::size_t part = place < 0 ? 0 : place >= kParts ? kParts + 1 : static_cast<std::size_t>(place) + 1;
      changes[part] += weight;
      if (problem_.targets[problem_.chosen[i]] > 0) changes[0] -= weight;
    }
    reduce(changes, 0);
    std::size_t part = 0;
    for (double slope = changes[0]; part < kParts && slope + changes[part + 1] < 0;) slope += changes[++part];
    size /= kParts;
    low += size * static_cast<double>(std::min(part, kParts - 1));
  }
  return low + size / 2;
}

void Newton::write_weights(std::span<float> out) const {
  TELEGRAD_CHECK(out.size() == weights());
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(best()[i]);
}

void Newton::write_biases(std::span<double> out) const {
  TELEGRAD_CHECK(out.size() == classes());
  std::copy(best().end() - static_cast<std::ptrdiff_t>(classes()), best().end(), out.begin());
}

void Newton::settle(bool ends) {
  if (descent_) {
    descent_->restore(duals_, w_.back());
    return;
  }
  if (ends && !best_.empty()) {
    w_ = best_;
  } else if (minimised_) {
    next_duals();
  }
  for (std::size_t i = 0; i < weights(); ++i) w_[i] = static_cast<double>(static_cast<float>(w_[i]));
  best_.clear();
  begun_ = false;
}

}  // namespace telegrad::linear
