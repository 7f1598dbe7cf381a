#pragma once
// Reduce-scatter by halving: what is left to reduce halves from round to round, on any number of ranks.

#include <bit>

#include "base/types.hpp"
#include "collectives/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// One round: of the `reach` blocks that a rank still holds, its own first, those from the `distance`-th on go to the
/// rank `distance` ahead.
struct HalvingRound {
  Rank reach = 0;
  Rank distance = 0;
  Rank blocks() const { return reach - distance; }
};
inline Rank halving_rounds(Rank size) { return static_cast<Rank>(std::bit_width(size - 1)); }
/// `round` in [0, halving_rounds(size)).
inline HalvingRound halving_round(Rank size, Rank round) {
  const auto reach = [&](Rank rounds) { return (size - 1 + (Rank{1} << rounds)) >> rounds; };  // ceil(size / 2^rounds)
  return {reach(round), reach(round + 1)};
}

/// Steps that halve() uses.
inline constexpr Step kHalvingSteps = 32 * 2 * 16;

/// mine = this rank's block, reduced over all ranks: all others have been heard when it is written; an average is left
/// to divide. `input` has partition.count() elements on all ranks; `mine` does not overlap it unless it is its own block.
/// P > 1. ceil(log2 P) messages; sends and receives (P−1)/P·n bytes where blocks are alike; holds scratch of 3/4·n.
/// Uses steps [0, kHalvingSteps).
Task<void> halve(Transport& net, DType dtype, Reduction reduction, ConstBytes input, const Partition& partition,
                 Bytes mine);

}  // namespace telegrad
