#include "collectives/ring.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace telegrad {
namespace {

using Run = std::function<Task<void>(std::size_t segment, Ring::Scratch& scratch)>;

Task<void> run_lane(const Ring& ring, std::size_t lane, const Run& run) {
  const std::size_t piece_bytes = part_of({0, ring.partition.longest()}, ring.segments, 0).size() * size_of(ring.dtype);
  Ring::Scratch scratch{Buffer(piece_bytes), Buffer(piece_bytes)};
  for (std::size_t segment = lane; segment < ring.segments; segment += ring.lanes) co_await run(segment, scratch);
}

}  // namespace

Ring::Ring(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Partition partition, RingTuning tuning)
    : net(net), dtype(dtype), reduction(reduction), input(input), partition(std::move(partition)) {
  const std::size_t message_bytes = std::max<std::size_t>(1, tuning.message_bytes);
  const std::size_t longest_bytes = this->partition.longest() * size_of(dtype);
  segments = std::max<std::size_t>(1, (longest_bytes + message_bytes - 1) / message_bytes);
  lanes = std::clamp<std::size_t>(tuning.lanes, 1, segments);
  segments += (lanes - segments % lanes) % lanes;  // so that no lane is left alone in the end
}

Task<void> ring_reduce_scatter(const Ring& ring, std::size_t segment, Step first_step, Ring::Scratch& scratch,
                               Bytes mine) {
  Transport& net = ring.net;
  const Rank size = net.size();
  const auto input = [&](Rank block) { return elements(ring.input, ring.dtype, ring.piece(block, segment)); };

  // In step t the block of the rank t + 1 to the left leaves, that of the rank t + 2 to the left comes.
  ConstBytes partial = input(ring.before(1));
  for (Rank t = 0; t + 1 < size; ++t) {
    const ConstBytes own = input(ring.before(t + 2));
    const Bytes received = scratch[t % 2].bytes().first(own.size());
    auto sending = net.send(ring.right(), first_step + t, partial);
    co_await net.receive(ring.left(), first_step + t, received);
    if (t + 2 < size) {
      co_await reduce(net, ring.dtype, ring.reduction, received, own);
      partial = received;
    }
    co_await sending;
  }
  // What came last is this rank's own block, and holds every other rank's share.
  const Bytes others = scratch[size % 2].bytes().first(mine.size());
  co_await reduce_to(net, ring.dtype, ring.reduction, others, input(net.rank()), mine);
  co_await finish_reduction(net, ring.dtype, ring.reduction, mine);
}

Task<void> run_lanes(const Ring& ring, Run run) {
  std::vector<Task<void>> running;
  for (std::size_t lane = 0; lane < ring.lanes; ++lane) running.push_back(run_lane(ring, lane, run));
  co_await when_all(std::move(running));
}

}  // namespace telegrad
