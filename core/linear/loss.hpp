#pragma once
// Losses of a row: of its score (w·x + bias) and its target, which is −1 or +1 but for the squared error.

#include <cmath>
#include <cstdint>

namespace telegrad::linear {

enum class Loss : std::uint8_t { logistic, hinge, squared_hinge, squared_error };

struct LossAt {
  double value = 0;
  double slope = 0;  // by the score; of the hinge's kink 0
};  // both are NaN where the score is, so that a training that has diverged does not look like one without errors

inline LossAt loss_at(Loss loss, double score, double target) {
  const double margin = score * target;
  switch (loss) {
    case Loss::logistic: {
      // exp of what is not positive: neither overflows nor loses the small ones
      const double small = std::exp(-std::abs(margin));
      const double value = std::log1p(small) + (margin < 0 ? -margin : 0);
      return {value, -target * (margin < 0 ? 1 : small) / (1 + small)};
    }
    case Loss::hinge:
      if (margin >= 1) return {};
      return {1 - margin, std::isnan(margin) ? margin : -target};
    case Loss::squared_hinge:
      if (margin >= 1) return {};
      return {(1 - margin) * (1 - margin), -2 * target * (1 - margin)};
    case Loss::squared_error: return {(score - target) * (score - target) / 2, score - target};
  }
  return {};
}

/// loss_at(…).slope alone, to the bit.
inline double slope_at(Loss loss, double score, double target) {
  if (loss != Loss::logistic) return loss_at(loss, score, target).slope;
  const double margin = score * target, small = std::exp(-std::abs(margin));
  return -target * (margin < 0 ? 1 : small) / (1 + small);
}

}  // namespace telegrad::linear
