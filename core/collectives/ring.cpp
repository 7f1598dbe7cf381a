#include "collectives/ring.hpp"

#include <utility>

#include "base/check.hpp"

namespace telegrad {

Ring::Ring(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Partition partition, LaneTuning tuning,
           InputMaker* maker)
    : net(net),
      dtype(dtype),
      reduction(reduction),
      input(input),
      partition(std::move(partition)),
      lanes(net, this->partition.longest() * size_of(dtype), tuning),
      maker(maker) {
  TELEGRAD_CHECK(maker == nullptr || reduction != Reduction::avg || size_of(dtype) > 2);
}

std::size_t Ring::longest_piece_bytes() const {
  return part_of({0, partition.longest()}, lanes.segments, 0).size() * size_of(dtype);
}

Task<void> ring_reduce_scatter(const Ring& ring, std::size_t segment, Step first_step, LaneScratch& scratch,
                               Bytes mine) {
  Transport& net = ring.net;
  const Rank size = net.size();
  const auto input = [&](Rank block) { return elements(ring.input, ring.dtype, ring.piece(block, segment)); };

  // In step t the block of the rank t + 1 to the left leaves, that of the rank t + 2 to the left comes.
  ConstBytes partial;
  if (ring.maker != nullptr) {
    const Range first = ring.piece(ring.before(1), segment);
    const Bytes made = scratch[1].bytes().first(first.size() * size_of(ring.dtype));  // it has left before others come there
    co_await ring.maker->make(first, made);
    partial = made;
  } else {
    partial = input(ring.before(1));
  }
  for (Rank t = 0; t + 1 < size; ++t) {
    const Range coming = ring.piece(ring.before(t + 2), segment);
    const Bytes received = scratch[t % 2].bytes().first(coming.size() * size_of(ring.dtype));
    auto sending = net.send(ring.right(), first_step + t, partial);
    co_await net.receive(ring.left(), first_step + t, received);
    if (t + 2 < size) {
      const Partial before{received, halvings_of(t + 1)};
      if (ring.maker != nullptr) {
        co_await ring.maker->reduce(coming, received, received);
      } else {
        const Partial one{input(ring.before(t + 2))};
        co_await reduce_partial(net, ring.dtype, ring.reduction, before, one, received, halvings_of(t + 2));
      }
      partial = received;
    }
    co_await sending;
  }
  // What came last is this rank's own block, and holds every other rank's share.
  const Partial others{scratch[size % 2].bytes().first(mine.size()), halvings_of(size - 1)};
  if (ring.maker != nullptr) {
    co_await ring.maker->reduce(ring.piece(net.rank(), segment), others.values, mine);
    co_await finish_reduction(net, ring.dtype, ring.reduction, mine);
  } else {
    co_await reduce_last(net, ring.dtype, ring.reduction, others, Partial{input(net.rank())}, mine);
  }
}

}  // namespace telegrad
