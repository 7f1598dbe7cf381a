#pragma once
// What the collectives share whose blocks go round a ring: the reduce-scatter.

#include <cstddef>

#include "base/types.hpp"
#include "collectives/support/elements.hpp"
#include "collectives/support/input_maker.hpp"
#include "collectives/support/lanes.hpp"
#include "collectives/support/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// A vector on a ring of all ranks. Segment s is the s-th part of every block, and goes round by itself.
struct Ring {
  Ring(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Partition partition, LaneTuning tuning,
       InputMaker* maker = nullptr);

  Transport& net;
  DType dtype;
  Reduction reduction;
  ConstBytes input;
  Partition partition;
  Lanes lanes;
  InputMaker* maker;  // in place of `input`; not for averages of f16 (CHECKed), of which partial sums are halved

  Rank right() const { return (net.rank() + 1) % net.size(); }
  Rank left() const { return (net.rank() + net.size() - 1) % net.size(); }
  /// The rank that is `hops` to the left of this one.
  Rank before(Rank hops) const { return (net.rank() + net.size() - hops) % net.size(); }
  Range piece(Rank block, std::size_t segment) const { return part_of(partition[block], lanes.segments, segment); }
  std::size_t longest_piece_bytes() const;
};

/// mine = the segment's piece of this rank's block, reduced over all ranks: all others have been heard when it is
/// written. Uses P − 1 steps from `first_step` on. The two pieces of `scratch` take turns: one arrives while the other
/// leaves.
Task<void> ring_reduce_scatter(const Ring& ring, std::size_t segment, Step first_step, LaneScratch& scratch,
                               Bytes mine);

}  // namespace telegrad
