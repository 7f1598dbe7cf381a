#pragma once
// The weights of a linear model under gradient steps that touch few of them, though a penalty shrinks all in every step.
//
// SGD: w ← prox(w − η·g), the prox of η·(l1·|w| + l2/2·w²), which is soft(w, η·l1) / (1 + η·l2). L2 is a scale that all
// weights share; L1 what a weight owes when it is next touched, which is exact: thresholds add up. (Cumulative
// penalties: Tsuruoka, Tsujii and Ananiadou 2009; here for a prox.)
// AdaGrad (Duchi, Hazan and Singer 2011, diagonal): G += g², w ← flow(w − η/√G·g) for the time η/√G of its own, see
// flow() in model.hpp; what a weight owes is again one flow.
//
// With a numbering, weights lie in its places: those whose features a rank's own rows have are next to one another, which
// its gradients look up at random; of all features' weights hardly any would be in a cache. No bit depends on it.

#include <cstdint>
#include <span>
#include <vector>

#include "linear/gradient.hpp"
#include "linear/large.hpp"
#include "linear/model.hpp"
#include "linear/numbering.hpp"
#include "linear/team.hpp"

namespace telegrad::linear {

enum class Rule : std::uint8_t { sgd, adagrad };

struct Penalty {
  double l1 = 0, l2 = 0;
};

class Descent {
 public:
  /// `team` and `numbering`, of as many features if there is one, outlive it.
  Descent(std::size_t features, Rule rule, Penalty penalty, bool with_bias, Team& team,
          const Numbering* numbering = nullptr);

  /// By places. Good until the next step.
  ModelView view() const;

  /// A step at the learning rate `rate`, by the sums over `rows` rows: of features `indices`, which are distinct, or of
  /// all of them where there are no indices; `slope` is the bias's. Sums of 0 touch nothing.
  void step(std::span<const std::uint32_t> indices, std::span<const float> sums, double slope, double rate,
            double rows);

  /// The same by what `gradient` has of places, which is then 0; its bits are the same. Returns BatchGradient::drain()'s
  /// number.
  std::size_t step(BatchGradient& gradient, double slope, double rate, double rows);

  struct Alone {
    double loss = 0;
    std::size_t entries = 0;  // that were added to weights or sums
  };

  /// A whole step of a rank that needs nobody: the gradient of `chosen` rows, in `gradient`, and the step by it. Where a
  /// step is the sum of what its entries do (SGD without L1), each goes to its weight at once, without a sum between:
  /// that takes less time, and rounds otherwise.
  Alone step_alone(BatchGradient& gradient, const RowsView& rows, std::span<const float> targets,
                   std::span<const std::uint64_t> chosen, Loss loss, double rate);

  /// The weights with all that they owe, by features.
  void write_weights(std::span<float> out) const;

  /// Takes from the weights all that they owe, which rounds. Steps go on from here as from what restore() is given.
  void settle();

  /// AdaGrad's sums of squared gradients, by features; `out` is empty with another rule.
  void write_squares(std::span<float> out) const;

  /// Before any step: goes on from what another had after settle(), to the bit.
  void restore(std::span<const float> weights, std::span<const float> squares, double bias, double bias_squares);

  std::size_t features() const { return weights_.size(); }

  double bias() const { return bias_; }

  /// AdaGrad's sum of the bias's.
  double bias_squares() const { return bias_squares_; }

 private:
  std::uint32_t place_of(std::uint32_t feature) const {
    return numbering_ == nullptr ? feature : numbering_->place_of(feature);
  }
  float worth_at(std::size_t place) const {
    return (last_.empty() ? weights_[place] : owed_.settled(weights_[place], place)) * static_cast<float>(scale_);
  }
  // Inlined always, as GCC drops calls of functions that do nothing but fetch.
  [[gnu::always_inline]] inline void fetch(std::size_t place) const;
  template <class Do>
  auto by_rule(double rate, double rows, const Do& act);
  void finish_step(double slope, double rate, double rows);
  // Where there are such weights, whenever the clock has changed, whose memory owed_ refers to.
  void see_owed();

  Rule rule_;
  Penalty penalty_;
  bool with_bias_;
  Team& team_;
  const Numbering* numbering_;
  LargeVector<float> weights_;
  double scale_ = 1, bias_ = 0, bias_squares_ = 0;
  LargeVector<float> squares_;       // AdaGrad's sums of squared gradients
  LargeVector<float> paces_;         // their roots' reciprocals, if weights owe
  LargeVector<std::uint32_t> last_;  // if weights owe: see Owed
  std::vector<double> clock_;
  Owed owed_;
};

}  // namespace telegrad::linear
