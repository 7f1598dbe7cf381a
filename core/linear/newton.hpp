#pragma once
// Newton's method for linear models, by conjugate gradients, among ranks that hold rows: no learning rate, and an estimate
// of how far the optimum is.
//
// Each rank sums gradients and Hessian-vector products over its own rows, and a callback sums them over the ranks. Vectors
// are whole on each rank, or each rank has the elements of the features in its own rows: then it needs no other sums than
// those, and a feature that one rank alone has needs none. Inner products are alike on all ranks: of the features that
// several have one rank counts each. A step is that of a truncated Newton method with a line search (Galli and Lin 2021; Nash
// and Sofer 1990 for when conjugate gradients end), scaled by the Hessian's diagonal (Hsia, Wei and Lin 2018). With few
// features the Hessian itself is summed and factorised.
//
// The gap of a step is the fall that its quadratic model predicts, an estimate. At the end the gradient g there replaces it by
// a bound: with l2 the curvature is at least that, so that f − f* ≤ |g|²/(2·l2). A bias has no penalty: of its slope the
// bound is for optima whose bias is not more than 1 + |bias| away. Without l2, and where steps end first, the estimate stays.
//
// Sums over rows have the same bits in any order, hence for any number of ranks and threads: each term is first rounded
// to a multiple of a number so large that no sum of such multiples rounds (Demmel and Nguyen 2013). That number follows
// from bounds of the terms: of their columns' largest values, of scores by the largest weight, and of what conjugate
// gradients sum by the last iteration. Inner products are such sums, too. Where rows differ so much in size that such bounds
// are far above most terms, what this rounding takes off is summed as well, in a vector of its own; not with an L1 penalty.
//
// With an L1 penalty a step minimises the quadratic model and that penalty (linear/lasso.hpp), over the weights that are not
// 0 or may leave it. Ranks then hold all weights, and sum products for these few alone. Of the least subgradient v at w, and
// as l1·|w*| is below the objective f at the optimum w*, convexity gives f − f* ≤ v·w + max|v|·f/l1, which is the gap.
//
// The hinge has no second derivative. Its proximal dual method (augmented Lagrangian; Rockafellar 1976) minimises
//   l2/2·|w|² + mean of E_h(1 − margin + h·a) − h·a²/2,   E_h(v) = 0, v²/(2h) or v − h/2 where v < 0, < h or above,
// whose a = clip(v/h, 0, 1) at the optimum are the next dual variables. That optimum is a lower bound of the hinge's
// objective, whatever a in [0, 1] and h are; both bounds meet as a converges. (Semismooth Newton steps for it: Li, Sun and
// Toh 2018.)

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/row_products.hpp"
#include "linear/large.hpp"
#include "linear/loss.hpp"
#include "linear/model.hpp"
#include "linear/team.hpp"

namespace telegrad::linear {

class DualDescent;

class Newton {
 public:
  struct Problem {
    RowsView rows;
    std::span<const std::uint64_t> chosen;     // the rows that count
    std::span<const float> targets;            // by row, as in `rows`
    std::span<const float> row_weights;        // likewise; none: all 1
    std::size_t total_rows = 0;                // of all ranks, that count
    std::size_t features = 0;                  // that vectors have here; indices are below
    std::size_t total_features = 0;            // that occur on any rank; 0: as many
    bool split = false;                        // vectors are: each rank has its own features
    std::span<const std::uint8_t> counted{};   // then: of which of them this rank's inner products have the terms
    std::size_t rank = 0, ranks = 1;           // likewise
    std::size_t classes = 1;                   // above 1: targets are numbers of classes, and the loss is softmax's
    Loss loss = Loss::logistic;
    double l2 = 0;  // above 0 for the hinge
    double l1 = 0;  // 0 for the hinge, for several classes and where vectors are split
    bool with_bias = true;
    double tolerance = 1e-4;  // of the gap to the optimum, as a part of the objective
    bool descends = false;    // for both hinges, if the rows are all there are: coordinates of the dual, as long as that is fast
    std::uint64_t seed = 0;   // of their order
  };

  /// Over ranks: sums, or the largest numbers, which are 0 or more. The first elements belong to features, `of_feature` of
  /// each side by side. Called by all ranks alike, by one rank alone, too; may throw.
  enum class Over : std::uint8_t { sum, largest };
  using Reduce = std::function<void(std::span<double> numbers, std::size_t of_feature, Over)>;

  Newton(const Problem& problem, Team& team, Reduce reduce);
  ~Newton();

  struct Step {
    double loss = 0;       // weighted mean, afterwards
    double objective = 0;  // afterwards
    double gap = 0;        // estimate of the part of the objective by which it was above the optimum before; in the end a bound
    std::size_t sums = 0;  // over ranks
    std::size_t iterations = 0;  // of conjugate gradients, the same for any number of ranks
    bool converged = false;
    bool stuck = false;  // no step makes the objective lower, but for rounding
  };

  /// One step. If `reduce` throws, the model is as before, or as after the step. After the `last` one, too, the gap is a
  /// bound.
  Step step(bool last = false);

  /// By feature, and of each by class.
  void write_weights(std::span<float> out) const;
  void write_biases(std::span<double> out) const;
  double bias() const { return best().back(); }
  double objective() const { return is_hinge() && !best_.empty() ? best_value_ : loss_ + penalty_; }

  /// The dual variables of the hinge, by chosen row, and h behind them; as restore() takes them.
  std::span<const double> duals() const { return duals_; }

  /// For a descent on few rows: of each chosen row its dual at these slopes, and by how much its margin lacks 1, which is
  /// below 0 where it is above.
  void write_margins(std::span<double> duals, std::span<double> lacking) const;

  /// `scores`: of each row, by the part of the weights that rows which do not `move` have by these duals, without a bias.
  /// Returns Σ weight·a·y of theirs, over all ranks, all of which call it.
  double fix(std::span<const std::uint8_t> moves, std::span<const double> duals, std::span<double> scores);

  /// The model of these duals, by chosen row, with the best bias for it, and how far from the optimum that is. Called by all
  /// ranks.
  Step take(std::span<const double> duals);

  /// Whether the last step was that, or restore() got what settle() left of it: then take() goes on from duals().
  bool taken() const { return taken_; }

  /// Of the present model, which of the hinge need not be the best.
  double present_bias() const { return w_.back(); }

  /// Goes on from this model. `duals`: none for other losses.
  void restore(std::span<const float> weights, double bias, std::span<const double> duals);

  /// What restore() would make of the present model. Where the training `ends` it is the best one. Before, it is where the
  /// steps for the hinge stand: with dual variables of later steps, they would not find the way back from the best one.
  void settle(bool ends);

 private:
  struct At {
    double value = 0, slope = 0, curvature = 0;
  };
  // What the steps minimise, but for the penalty; the loss itself; of the hinge the dual variables at such slopes.
  struct Value {
    double smoothed = 0, plain = 0, duals = 0;
  };

  std::size_t rows() const { return problem_.chosen.size(); }
  std::size_t classes() const { return problem_.classes; }
  std::size_t weights() const { return problem_.features * classes(); }
  std::size_t width() const { return weights() + classes(); }  // and the biases
  double weight(std::uint64_t row) const {
    return problem_.row_weights.empty() ? 1 : static_cast<double>(problem_.row_weights[row]);
  }
  const LargeVector<double>& best() const { return best_.empty() ? w_ : best_; }
  bool is_hinge() const { return problem_.loss == Loss::hinge; }

  template <class Do>
  void by_loss(const Do& act) const;
  template <class Do>
  void by_rounding(double largest, bool squared, const Do& act) const;
  double score(std::size_t row, const double* w) const;
  void score_row(std::size_t i, const double* w, double* out) const;
  void score_rows(const LargeVector<double>& w, std::vector<double>& out);
  double bound_of_scores(const LargeVector<double>& w, double scaled) const;
  double scaled(const LargeVector<double>& w) const;
  double bound_of_slopes() const;
  double bound_of_curvatures() const;
  void begin_bounds();
  bool has_uneven_column();
  void sum_columns(const std::vector<double>& by_row, bool squared, double largest, double* out);
  Step descend();
  void begin_directly();
  void end_descents();
  Value evaluate(double part);
  double softmax(std::size_t i, double part);
  template <std::size_t kSums, class Terms>
  void sum_features(const Terms& terms, double (&sums)[kSums], std::span<double> largest = {});
  void measure_weights();
  void begin();
  void find_gradient();
  void prove(Step& done);
  double most_to_win(const LargeVector<double>& gradient);
  double dual_bound(double& inner);
  double balanced_bound(std::span<const double> duals);
  void move_duals(Step& done);
  double next_dual(std::size_t i) const;
  void next_duals();
  double best_bias();
  void sum_duals(std::span<const double> duals, std::span<const std::uint8_t> without, double* out);
  void keep_best();
  double solve();
  bool keeps_hessian() const;
  const std::vector<double>& begin_hessian();
  void sum_hessian();
  bool solve_directly(double& predicted);
  Step step_with_l1();
  double gap_with_l1(double& worst) const;
  void solve_with_l1(double target);
  void choose_active();
  void multiply_active(std::span<const double> direction, std::span<double> product);
  double absolute(double part) const;
  double solve_iteratively();
  double multiply(double most, double most_scaled);
  double search();
  void reduce(std::span<double> numbers, std::size_t of_feature, Over over = Over::sum);
  void reduce_columns(std::span<double> numbers);
  void add(double term, double magic, double* sums, std::size_t place) {
    const double most = kernels::rounded(term, magic);
    sums[place] += most;
    if (uneven_) rest_[place] += kernels::rounded(term - most, magic * tail_);
  }

  Problem problem_;
  Team& team_;
  Reduce reduce_;
  std::size_t sums_ = 0, iterations_ = 0, noise_ = 0;
  bool bounded_ = false, begun_ = false, moves_known_ = false, direct_ = false;
  bool taken_ = false;      // w_ is that of duals_
  bool minimised_ = false;  // what the steps for the hinge minimise
  bool has_gradient_ = false;  // the next step, of w_
  double loss_ = 0, smoothed_ = 0, weighted_duals_ = 0, penalty_ = 0;  // at w_
  LargeVector<double> w_, gradient_, diagonal_, step_, residual_, direction_, product_, hessian_;
  LargeVector<double> kept_hessian_;   // this rank's sums for the squared hinge, of the rows
  std::vector<std::uint8_t> curved_;   // that had a curvature then
  LargeVector<double> counted_;  // of each weight 1 or 0, if vectors are split
  LargeVector<double> best_;  // of the hinge, whose steps minimise something else
  double best_value_ = 0, best_penalty_ = 0, bound_ = 0;
  std::vector<double> scores_, moved_, along_, weighted_, slopes_, curvatures_;
  std::vector<double> parts_;
  // Bounds, alike on all ranks: of a row's weight, target and entries; of columns' values, powers of two, all the same if
  // their sizes differ little; and 1.5 times powers of two of at least twice all rows, and
  // twice as many terms as inner products have.
  double heaviest_ = 1, farthest_ = 1, most_entries_ = 1, rounding_ = 0, product_rounding_ = 0, total_weight_ = 1;
  double score_bound_ = 0, moved_bound_ = 0, column_ = 1, of_bias_ = 0;
  bool uniform_ = true;
  LargeVector<double> largest_;
  // Where few rows have far larger values than the others, sums over rows have a second part: of what rounding took off.
  bool uneven_ = false;
  double tail_ = 0;
  LargeVector<double> rest_;
  std::vector<std::size_t> borders_;  // of threads' features
  std::vector<double> duals_;
  std::unique_ptr<DualDescent> descent_;  // while it is fast
  // With an L1 penalty: the features whose weights a step may move, where each feature is among them, and their entries.
  std::vector<std::uint32_t> active_;
  LargeVector<std::uint32_t> places_;
  std::vector<std::uint64_t> active_offsets_;  // by row
  std::vector<std::uint32_t> active_indices_;
  std::vector<float> active_values_;
  std::vector<std::size_t> active_borders_;  // of threads
};

}  // namespace telegrad::linear
