#pragma once
// Dual coordinate descent for the hinge, squared or not, on rows that one rank holds, with shrinking (Hsieh, Chang, Lin,
// Keerthi and Sundararajan 2008, Algorithms 1 and 3). A step of one row costs as much as its score. Well conditioned rows,
// such as those of text, need few passes; others need Newton's method, which step() asks for.
//
// With C_i = weight_i / (l2·sum of weights) the duals a_i in [0, 1] give w = Σ C_i·a_i·y_i·x_i. The squared hinge's have no
// upper bound, and cost C_i·a_i²/4. A bias has no penalty, which a descent by coordinates cannot do: Σ C_i·a_i·y_i must be 0.
// The method of multipliers adds (bias − center)²/(2·strength) to the objective and moves the center to the bias after each
// pass (Hestenes 1969).
//
// Both bounds behind the gap are exact: the objective at w and the best bias for it, and the dual objective, where duals of
// one class are scaled down until the constraint of the bias holds.

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "linear/large.hpp"
#include "linear/newton.hpp"

namespace telegrad::linear {

class DualDescent {
 public:
  /// What other rows give whose duals do not move: they are 0, or 1 and their losses not 0.
  struct Fixed {
    std::span<const double> scores;  // of each chosen row by their part of the weights
    double imbalance = 0;            // Σ C_i·a_i·y_i of theirs
    double objective = 0;            // with them, of which gaps are parts
    double total_weight = 0;         // of all rows
  };

  /// `problem`: of one rank alone.
  explicit DualDescent(const Newton::Problem& problem) : DualDescent(problem, {}) {}
  DualDescent(const Newton::Problem& problem, const Fixed& fixed);

  struct Step {
    double loss = 0, objective = 0, gap = 0;
    bool converged = false;
    bool slow = false;  // Newton's method should go on from here
  };

  /// Passes until the gap is a quarter of what it was, but a bounded number. `look` is called before each and may throw.
  Step step(const std::function<void()>& look);

  /// Behind the weights, without the part of fixed rows, the bias.
  const LargeVector<double>& weights() const { return w_; }

  void write_duals(std::span<double> out) const;

  /// Those of the lower bound, with which the constraint of the bias holds.
  void write_balanced(std::span<double> out) const;

  /// Goes on from these duals, and this bias.
  void restore(std::span<const double> duals, double bias);

 private:
  struct Row {
    std::uint64_t begin = 0, end = 0;
    double target = 0, cost = 0, inverse = 0, dual = 0, fixed = 0;
  };

  double score(const Row& row) const;
  void add(const Row& row, double factor, LargeVector<double>& out) const;
  double loss_of(double lacking) const;  // of what a row's margin lacks
  double pass();
  void measure();
  double best_bias();

  Newton::Problem problem_;
  std::uint64_t random_ = 0;
  double highest_dual_ = 1, softness_ = 0;  // the latter of duals: half their cost's curvature, by C_i
  double strength_ = 0;                     // of the bias
  double center_ = 0, imbalance_ = 0;
  double fixed_imbalance_ = 0, whole_ = 0;
  double kept_[2] = {1, 1};  // of each class's duals, for the lower bound
  double positive_ = 0;  // of all costs, those of rows of the positive class
  std::vector<Row> rows_;
  std::vector<std::uint32_t> order_;
  std::size_t active_ = 0;
  double highest_ = 0, lowest_ = 0;  // of the last pass's projected gradients
  double dual_ = 0;                  // objective, as passes change it
  LargeVector<double> w_, excess_;
  std::vector<std::pair<double, double>> kinks_;  // by bias, and the cost with the target's sign
  Step last_;
  bool measured_ = false;
};

}  // namespace telegrad::linear
