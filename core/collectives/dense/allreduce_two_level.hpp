#pragma once

#include <cstddef>

#include "base/types.hpp"
#include "collectives/support/nodes.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// How a long vector is cut; the same on all ranks.
struct TwoLevelTuning {
  /// A slice goes between nodes in parts of about so many bytes.
  std::size_t part_bytes = std::size_t{512} << 10;
};

/// In how many segments a vector goes of which an owner has so many bytes.
std::size_t two_level_segments(std::size_t slice_bytes, TwoLevelTuning tuning = {});

/// output = the reduction of all ranks' inputs, the same bits on every rank, which live in `nodes` (CHECKed: two levels).
/// `input` and `output` have the same length on all ranks; they are the same memory or do not overlap. With S slices and
/// N nodes, an owner sends and receives about 2(N−1)/N·n/S bytes between nodes, by recursive doubling n/S·log2 N; a rank
/// of a node of R ranks 2(R−1)/R·n inside. Holds scratch of n/S and what the phases take. `output` is written only where
/// this rank has heard, directly or through others, from every other.
Task<void> allreduce_two_level(Transport& net, const Nodes& nodes, DType dtype, Reduction reduction, ConstBytes input,
                               Bytes output, TwoLevelTuning tuning = {});

}  // namespace telegrad
