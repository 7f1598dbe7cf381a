// Reduce-scatter by halving: ceil(log2 P) α + (P−1)/P·n(β + γ); round a ring: (P−1)(α + n/P·β) with work that overlaps.
// The halving moves no more bytes than the ring in fewer messages, but holds 3/4·n of scratch where the ring has a few
// messages that stay in the cache. A ring passes every block through all ranks: no good if one is most of the vector.
#include "collectives/dense/reduce_scatter.hpp"

#include <utility>

#include "base/check.hpp"
#include "collectives/support/elements.hpp"
#include "collectives/support/halving.hpp"

namespace telegrad {
namespace {

// From so many bytes of every block on a ring's latencies no longer matter.
constexpr std::size_t kRingBlockBytes = std::size_t{256} << 10;

void check_lengths(const Transport& net, DType dtype, ConstBytes input, const Partition& partition, Bytes mine) {
  TELEGRAD_CHECK(partition.blocks() == net.size() && input.size() == partition.count() * size_of(dtype) &&
                 mine.size() == partition[net.rank()].size() * size_of(dtype));
}

}  // namespace

Task<void> reduce_scatter_halving(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Partition partition,
                                  Bytes mine) {
  check_lengths(net, dtype, input, partition, mine);
  if (net.size() == 1) {
    co_await copy(net, input, mine);
    co_return;
  }
  co_await halve(net, dtype, reduction, input, partition, mine);
}

Task<void> reduce_scatter_ring(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Partition partition,
                               Bytes mine, LaneTuning tuning) {
  check_lengths(net, dtype, input, partition, mine);
  if (net.size() == 1) {
    co_await copy(net, input, mine);
    co_return;
  }
  const Ring ring(net, dtype, reduction, input, std::move(partition), tuning);
  const Range block = ring.partition[net.rank()];
  co_await run_lanes(ring.lanes, ring.longest_piece_bytes(), [&ring, block, mine](std::size_t segment, LaneScratch& scratch) {
    const Range piece = ring.piece(ring.net.rank(), segment);
    return ring_reduce_scatter(ring, segment, static_cast<Step>(segment) * (ring.net.size() - 1), scratch,
                               elements(mine, ring.dtype, {piece.begin - block.begin, piece.end - block.begin}));
  });
}

Task<void> reduce_scatter(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Partition partition,
                          Bytes mine) {
  const std::size_t mean = partition.count() / net.size();
  const bool ring = mean * size_of(dtype) >= kRingBlockBytes && partition.longest() <= 2 * mean;
  return ring ? reduce_scatter_ring(net, dtype, reduction, input, std::move(partition), mine)
              : reduce_scatter_halving(net, dtype, reduction, input, std::move(partition), mine);
}

}  // namespace telegrad
