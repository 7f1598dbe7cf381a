#pragma once
// A copy of those weights whose features a rank's own rows have, in the places of their numbering: a rank's gradients look
// these up at random, and of all features' weights hardly any would be in a cache.
//
// What weights owe is copied as it stands, not paid: so scores have the bits that all features' weights would give. For a
// batch that reads weights several times each, what they are worth is found once.

#include <cstdint>
#include <span>
#include <vector>

#include "linear/descent.hpp"
#include "linear/large.hpp"
#include "linear/model.hpp"
#include "linear/numbering.hpp"
#include "linear/team.hpp"

namespace telegrad::linear {

class OwnWeights {
 public:
  /// All outlive it. The numbered features are below those of `descent`.
  OwnWeights(const Descent& descent, const Numbering& numbering, Team& team);

  /// To be called after every step of the descent, with its indices: rising, or none where all weights were touched.
  void follow(std::span<const std::uint32_t> indices);

  /// The descent's view, with places for features, for scores of the `chosen` of these rows. Good until its next step and
  /// the next view.
  ModelView view(const RowsView& rows, std::span<const std::uint64_t> chosen);

  /// Replaces places by their features.
  void to_features(std::span<std::uint32_t> places) const;

 private:
  void copy_all();
  void find_worths();

  const Descent& descent_;
  const Numbering& numbering_;
  Team& team_;
  std::vector<std::uint32_t> features_;  // of each place
  std::size_t rewrites_;
  LargeVector<float> weights_;
  LargeVector<float> paces_;  // this and the next as in Owed
  LargeVector<std::uint32_t> last_;
  Owed owed_;
  LargeVector<float> worths_;  // of weights that owe
};

}  // namespace telegrad::linear
