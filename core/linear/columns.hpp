#pragma once
// One rank's rows by columns, for steps along a block of coordinates. Source of the method: Wright 2015 (SparCML's
// [53]); of the bound below: separable over-approximation, as in parallel coordinate descent.
//
// With all columns of a block B moved at once by D, a loss whose curvature is at most κ grows by at most
//   Σ_j (g_j·D_j + h_j/2·D_j²),  g_j = Σ_r slope_r·x_rj,  h_j = κ·Σ_r n_r·x_rj²,
// where n_r is how many entries row r has in the block: (Σ_j x_rj·D_j)² ≤ n_r·Σ_j x_rj²·D_j² (Cauchy and Schwarz).

#include <cstdint>
#include <span>
#include <vector>

#include "linear/large.hpp"
#include "linear/loss.hpp"
#include "linear/model.hpp"
#include "linear/team.hpp"

namespace telegrad::linear {

class Columns {
 public:
  /// The rows `chosen`, numbered anew from 0 in this order; fewer than 2^32. `team` outlives it.
  Columns(const RowsView& rows, std::span<const std::uint64_t> chosen, std::size_t features, Team& team);

  /// The entries of column j: [offsets()[j], offsets()[j + 1]).
  std::span<const std::uint64_t> offsets() const { return offsets_; }

  /// Of each column of `block` the sums g and n_r·x² over the rows (h without κ). `scores` and `targets`: by row; `bias`
  /// is added to scores.
  void derivatives(std::span<const std::uint32_t> block, std::span<const double> scores, std::span<const float> targets,
                   double bias, Loss loss, std::span<double> slopes, std::span<double> curvatures);

  /// scores += the columns of `block`, each times its change. Each score's sum is formed in the block's order.
  void move(std::span<const std::uint32_t> block, std::span<const float> changes, std::span<double> scores);

 private:
  std::size_t rows_;
  Team& team_;
  LargeVector<std::uint64_t> offsets_;
  LargeVector<std::uint32_t> row_of_;
  LargeVector<float> values_;
  LargeVector<std::uint32_t> in_block_;  // n_r, 0 between calls
};

struct LossSums {
  double loss = 0, slope = 0;
};

/// Over rows whose scores these are, but for the bias.
LossSums sum_losses(std::span<const double> scores, std::span<const float> targets, double bias, Loss loss);

}  // namespace telegrad::linear
