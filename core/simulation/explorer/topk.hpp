#pragma once
// Of a sum of which a part is kept: what a rank got, and what must not be in it. The sum's own entries are in SeenCall. Pure.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "collectives/topk/oktopk.hpp"
#include "simulation/explorer/program.hpp"
#include "simulation/explorer/values.hpp"

namespace telegrad::explorer {

struct SeenTopk {
  std::vector<std::uint32_t> left_indices{};
  std::vector<std::byte> left_values{};
  TopkReport report{};
  OkTopkState before{};
  OkTopkState after{};
};

/// A rank's entries of the sum, as SeenCall has them.
struct SeenEntries {
  const std::vector<std::uint32_t>& indices;
  const std::vector<std::byte>& values;
};

/// What is wrong with a successful call of `rank`, or nothing: entries are those of the true sum, those that it must keep,
/// and all others of this rank are handed back; no more words than promised; the state is that of its successor.
std::string fault_of_topk(const Program& program, const PlannedCall& call, Rank rank, const SeenTopk& seen,
                          SeenEntries sum, const Expected& expected);

/// One rank's part in a sum that has succeeded everywhere, and what rounding has lost on it.
struct TopkPart {
  const PlannedCall& call;
  const SeenTopk& seen;
  const std::vector<float>& lost;
};

/// Whether the sum, what ranks have left and what rounding has lost are not what they have given; `parts` by rank.
std::string fault_of_balance(const std::vector<TopkPart>& parts, SeenEntries sum);

}  // namespace telegrad::explorer
