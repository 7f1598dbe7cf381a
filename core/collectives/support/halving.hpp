#pragma once
// Reduce-scatter by halving: what is left to reduce halves from round to round, on any number of ranks.

#include <bit>
#include <cstddef>

#include "base/types.hpp"
#include "collectives/support/partition.hpp"
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

/// A round's message goes in so many pieces at most: enough for all but enormous ones to be of the length that is best.
inline constexpr std::size_t kPiecesMost = 1024;
/// Those of a message of so many blocks, by their mean length, which all ranks know alike.
std::size_t pieces_of(const Transport& net, const Partition& partition, DType dtype, Rank blocks);
/// The step of one of the two parts of a piece: what lies around the end of the vector goes in two messages.
inline Step step_of(Rank round, std::size_t piece, std::size_t part) {
  return static_cast<Step>((round * kPiecesMost + piece) * 2 + part);
}
/// Steps that halve() uses.
inline constexpr Step kHalvingSteps = 32 * 2 * kPiecesMost;

/// mine = this rank's block, reduced over all ranks: all others have been heard when it is written. `input` has
/// partition.count() elements on all ranks; `mine` does not overlap it unless it is its own block. P > 1. ceil(log2 P)
/// messages, long ones in pieces; sends and receives (P−1)/P·n bytes where blocks are alike; holds scratch of 3/4·n. Uses
/// steps [0, kHalvingSteps).
Task<void> halve(Transport& net, DType dtype, Reduction reduction, ConstBytes input, const Partition& partition,
                 Bytes mine);

}  // namespace telegrad
