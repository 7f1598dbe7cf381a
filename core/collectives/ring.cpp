#include "collectives/ring.hpp"

#include <utility>

namespace telegrad {

Ring::Ring(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Partition partition, LaneTuning tuning,
           InputMaker* maker)
    : net(net),
      dtype(dtype),
      reduction(reduction),
      input(input),
      partition(std::move(partition)),
      lanes(net, this->partition.longest() * size_of(dtype), tuning),
      maker(maker) {}

std::size_t Ring::longest_piece_bytes() const {
  return part_of({0, partition.longest()}, lanes.segments, 0).size() * size_of(dtype);
}

Task<void> ring_reduce_scatter(const Ring& ring, std::size_t segment, Step first_step, LaneScratch& scratch,
                               Bytes mine) {
  Transport& net = ring.net;
  const Rank size = net.size();
  const auto input = [&](Rank block) { return elements(ring.input, ring.dtype, ring.piece(block, segment)); };

  // In step t the block of the rank t + 1 to the left leaves, that of the rank t + 2 to the left comes.
  if (ring.maker != nullptr) co_await ring.maker->make(ring.piece(ring.before(1), segment));
  ConstBytes partial = input(ring.before(1));
  for (Rank t = 0; t + 1 < size; ++t) {
    const ConstBytes own = input(ring.before(t + 2));
    const Bytes received = scratch[t % 2].bytes().first(own.size());
    auto sending = net.send(ring.right(), first_step + t, partial);
    auto receiving = net.receive(ring.left(), first_step + t, received);
    if (ring.maker != nullptr) co_await ring.maker->make(ring.piece(ring.before(t + 2), segment));
    co_await receiving;
    if (t + 2 < size) {
      const Partial before{received, halvings_of(t + 1)};
      const Partial one{own};
      co_await reduce_partial(net, ring.dtype, ring.reduction, before, one, received, halvings_of(t + 2));
      partial = received;
    }
    co_await sending;
  }
  // What came last is this rank's own block, and holds every other rank's share.
  const Partial others{scratch[size % 2].bytes().first(mine.size()), halvings_of(size - 1)};
  const Partial own{input(net.rank())};
  co_await reduce_last(net, ring.dtype, ring.reduction, others, own, mine);
}

}  // namespace telegrad
