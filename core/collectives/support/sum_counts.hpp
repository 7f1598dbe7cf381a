#pragma once
// Counts of all ranks, in messages as short as their numbers are small.

#include <cstdint>
#include <span>
#include <vector>

#include "collectives/support/traffic.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// counts = the sums of all ranks' counts, of the last `maxima` of them the largest. All ranks pass as many, none larger than
/// `most`, with which all ranks' are below 2^56: a message that says more is damaged.
/// Few go by recursive doubling, log2 P messages of all of them; many are scattered and gathered, 2 ceil(log2 P) messages of
/// 2(P−1)/P of them together. Uses kSumCountsSteps steps from `first_step` on.
Task<void> sum_counts(Transport& net, std::span<std::uint64_t> counts, std::size_t maxima, std::uint64_t most,
                      SparseTraffic& traffic, Step first_step);
inline constexpr Step kSumCountsSteps = 128;
/// No rank sends or receives more, where all ranks' counts have this `total` together.
std::uint64_t sum_counts_bytes_most(std::size_t counts, Rank ranks, std::uint64_t total);

/// Every rank's `mine`, one behind the other; all pass as many. Bruck's allgather. Uses kGatherCountsSteps.
Task<std::vector<std::uint64_t>> gather_counts(Transport& net, std::span<const std::uint64_t> mine, SparseTraffic& traffic,
                                               Step first_step);
inline constexpr Step kGatherCountsSteps = 32;
/// No rank sends or receives more, where each passes so many, and all have this `total` together.
std::uint64_t gather_counts_bytes_most(std::size_t counts, Rank ranks, std::uint64_t total);

/// keys = all ranks' keys, ascending; there are `total` of them. By recursive doubling. Uses kMergeKeysSteps.
Task<void> merge_keys(Transport& net, std::vector<std::uint64_t>& keys, std::size_t total, SparseTraffic& traffic,
                      Step first_step);
inline constexpr Step kMergeKeysSteps = 64;

}  // namespace telegrad
