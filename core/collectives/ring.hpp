#pragma once
// What the collectives share whose blocks go round a ring: the reduce-scatter, and the lanes that keep ports and
// processor busy at once.

#include <array>
#include <cstddef>
#include <functional>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "collectives/partition.hpp"
#include "collectives/elements.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// How a long vector is cut so that receiving, adding and sending overlap. All ranks use the same.
struct RingTuning {
  /// A vector is cut into segments such that messages are about this long at most.
  std::size_t message_bytes = std::size_t{256} << 10;
  /// How many segments are on their way at once.
  std::size_t lanes = 2;
};

/// A vector on a ring of all ranks. Segment s is the s-th part of every block, and goes round by itself.
struct Ring {
  /// Two pieces take turns: one arrives while the other leaves.
  using Scratch = std::array<Buffer, 2>;

  Ring(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Partition partition, RingTuning tuning);

  Transport& net;
  DType dtype;
  Reduction reduction;
  ConstBytes input;
  Partition partition;
  std::size_t segments;
  std::size_t lanes;

  Rank right() const { return (net.rank() + 1) % net.size(); }
  Rank left() const { return (net.rank() + net.size() - 1) % net.size(); }
  /// The rank that is `hops` to the left of this one.
  Rank before(Rank hops) const { return (net.rank() + net.size() - hops) % net.size(); }
  Range piece(Rank block, std::size_t segment) const { return part_of(partition[block], segments, segment); }
};

/// mine = the segment's piece of this rank's block, reduced over all ranks: all others have been heard when it is
/// written. Uses P − 1 steps from `first_step` on.
Task<void> ring_reduce_scatter(const Ring& ring, std::size_t segment, Step first_step, Ring::Scratch& scratch,
                               Bytes mine);

/// `run` for every segment, as many at once as there are lanes, each lane with scratch of its own.
Task<void> run_lanes(const Ring& ring, std::function<Task<void>(std::size_t segment, Ring::Scratch& scratch)> run);

}  // namespace telegrad
