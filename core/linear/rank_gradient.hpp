#pragma once
// One rank's gradient as others are to get it: sorted entries of features, and behind all features' the bias's and the
// loss, so that one sum serves all.
//
// It is formed in the places of the rank's numbering. What weights owe is read as it stands, not paid; for a batch that
// reads weights several times each, what they are worth is found once. Neither changes a bit.

#include <cstdint>
#include <span>
#include <vector>

#include "linear/descent.hpp"
#include "linear/gradient.hpp"
#include "linear/large.hpp"
#include "linear/loss.hpp"
#include "linear/model.hpp"
#include "linear/numbering.hpp"
#include "linear/team.hpp"

namespace telegrad::linear {

class RankGradient {
 public:
  static constexpr std::size_t kBehind = 2;  // entries behind the features': the bias's and the loss

  /// All outlive it. `numbering` is the descent's, or none like its.
  RankGradient(const Descent& descent, const Numbering* numbering, Team& team);

  /// Adds up what the `chosen` rows, whose indices are places, give by the descent's weights. Returns how many entries
  /// there are, those behind included.
  std::size_t find(const RowsView& rows, std::span<const float> targets, std::span<const std::uint64_t> chosen,
                   Loss loss);

  /// These entries, once: as many as find() has just said.
  void take(std::span<std::uint32_t> indices, std::span<float> values);

 private:
  ModelView view(const RowsView& rows, std::span<const std::uint64_t> chosen);

  const Descent& descent_;
  Team& team_;
  std::vector<std::uint32_t> features_;  // of each place, if they differ
  std::size_t places_;
  BatchGradient gradient_;
  BatchGradient::Sums sums_;
  LargeVector<float> worths_;  // of weights that owe
};

}  // namespace telegrad::linear
