#pragma once
// A linear model as its scores see it, with what its penalty has still to do to weights that steps did not touch.

#include <cmath>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace telegrad::linear {

/// Rows in compressed form: row r has the entries [offsets[r], offsets[r + 1]).
struct RowsView {
  std::span<const std::uint64_t> offsets;
  std::span<const std::uint32_t> indices;
  std::span<const float> values;
};

/// std::expm1 to 1e-13 of itself, in less time where there is little to do, as nearly always.
inline double expm1_of(double x) {
  return std::abs(x) < 1e-3 ? x * (1 + x * (1. / 2 + x * (1. / 6 + x * (1. / 24 + x * (1. / 120))))) : std::expm1(x);
}

/// A weight under the penalty l1·|w| + l2/2·w² alone, after `time` of its gradient flow. Any division of the time
/// gives the same, so that many steps cost one.
inline double flow(double weight, double time, double l1, double l2) {
  const double size = std::abs(weight);
  const double kept = l2 == 0 ? size - l1 * time : size + (size + (l1 == 0 ? 0 : l1 / l2)) * expm1_of(-l2 * time);
  return kept <= 0 ? 0 : std::copysign(kept, weight);  // a NaN stays one
}

/// The penalty that weights owe since the step in which each was last touched.
struct Owed {
  std::span<const std::uint32_t> last;  // the step after which each weight owes
  std::span<const double> clock;        // the time at which each step began
  double now = 0;
  std::span<const float> paces;  // AdaGrad's: by which a weight's time goes; none: 1
  double l1 = 0, l2 = 0;

  float settled(float weight, std::size_t index) const {
    if (weight == 0) return 0;
    double time = now - clock[last[index]];
    if (time == 0) return weight;
    if (!paces.empty()) time *= static_cast<double>(paces[index]);
    return static_cast<float>(flow(static_cast<double>(weight), time, l1, l2));
  }
};

/// Its weights are scale · weights, less what they owe. So shrinking all of them (L2) costs one multiplication.
struct ModelView {
  std::span<const float> weights;
  double scale = 1;
  double bias = 0;
  const Owed* owed = nullptr;
};

/// scale · (weights · row) + bias, summed in f64 in the order of the entries.
double score_of(const RowsView& rows, std::size_t row, const ModelView& model);

/// score_of() two rows, to the bit, in less time: the terms of one wait for those of the other no more.
std::pair<double, double> scores_of(const RowsView& rows, std::size_t one, std::size_t other, const ModelView& model);

/// The scores of rows `first`, `first` + 1, …, as many as `scores` has room for.
void score_rows(const RowsView& rows, std::size_t first, const ModelView& model, std::span<float> scores);

}  // namespace telegrad::linear
