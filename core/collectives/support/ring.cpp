#include "collectives/support/ring.hpp"

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
  TELEGRAD_CHECK(maker == nullptr || reduction != Reduction::avg || dtype != DType::f16);
}

std::size_t Ring::longest_piece_bytes() const {
  return part_of({0, partition.longest()}, lanes.segments, 0).size() * size_of(dtype);
}

Task<void> ring_reduce_scatter(const Ring& ring, std::size_t segment, Step first_step, LaneScratch& scratch,
                               Bytes mine) {
  Transport& net = ring.net;
  const Rank size = net.size();
  const auto input = [&](Rank block) { return elements(ring.input, ring.dtype, ring.piece(block, segment)); };
  const auto in_scratch = [&](Rank t, Rank block) {
    return scratch[t % 2].bytes().first(ring.piece(block, segment).size() * size_of(ring.dtype));
  };

  // In step t the block of the rank t + 1 to the left leaves, that of the rank t + 2 to the left comes.
  ConstBytes partial;
  if (ring.maker != nullptr) {
    const Bytes made = in_scratch(1, ring.before(1));  // it has left before others come there
    co_await ring.maker->make(ring.piece(ring.before(1), segment), made);
    partial = made;
  } else {
    partial = input(ring.before(1));
  }
  for (Rank t = 0; t + 1 < size; ++t) {
    const Rank coming = ring.before(t + 2);
    const Bytes received = in_scratch(t, coming);
    auto sending = net.send(ring.right(), first_step + t, partial);
    co_await net.receive(ring.left(), first_step + t, received);
    if (t + 2 < size) {
      const Partial before{received, halvings_of(t + 1)};
      if (ring.maker != nullptr) {
        co_await ring.maker->reduce(ring.piece(coming, segment), received, received);
      } else {
        const Partial one{input(coming)};
        co_await reduce_partial(net, ring.dtype, ring.reduction, before, one, received, halvings_of(t + 2));
      }
      partial = received;
    }
    co_await sending;
  }
  // What came last is this rank's own block, and holds every other rank's share.
  const Partial others{in_scratch(size, net.rank()), halvings_of(size - 1)};
  Partial own;
  if (ring.maker != nullptr) {
    const Bytes made = in_scratch(size + 1, net.rank());
    co_await ring.maker->make(ring.piece(net.rank(), segment), made);
    own.values = made;
  } else {
    own.values = input(net.rank());
  }
  co_await reduce_last(net, ring.dtype, ring.reduction, others, own, mine);
}

}  // namespace telegrad
