// Ring allreduce: 2(P−1)α + 2(P−1)/P·nβ + (P−1)/P·nγ. Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for
// clusters of workstations", J. Parallel and Distributed Computing 69(2), 2009, §4.
//
// Block b travels to the right from rank b + 1 round to rank b, and every rank adds its own share: b then holds the sum
// and owns it. The owners' blocks travel round once more. Long vectors are cut into segments, each with a ring of its
// own; a few of them (lanes) are on their way at once, so that one adds while others send and receive.
#include "collectives/allreduce_ring.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "collectives/blocks.hpp"
#include "collectives/elements.hpp"

namespace telegrad {
namespace {

struct Ring {
  Transport& net;
  DType dtype;
  Reduction reduction;
  ConstBytes input;
  Bytes output;

  std::size_t segments = 1;
  Rank right() const { return (net.rank() + 1) % net.size(); }
  Rank left() const { return (net.rank() + net.size() - 1) % net.size(); }
  // The rank that is `hops` to the left of this one.
  Rank before(Rank hops) const { return (net.rank() + net.size() - hops) % net.size(); }
  std::size_t count() const { return input.size() / size_of(dtype); }
};

Task<void> run_segment(const Ring& ring, std::size_t segment, std::array<Buffer, 2>& scratch) {
  Transport& net = ring.net;
  const Rank size = net.size();
  const Range whole = part_of({0, ring.count()}, ring.segments, segment);
  const auto input = [&](Rank block) { return elements(ring.input, ring.dtype, part_of(whole, size, block)); };
  const auto output = [&](Rank block) { return elements(ring.output, ring.dtype, part_of(whole, size, block)); };
  Step step = static_cast<Step>(segment) * 2 * (size - 1);

  // Reduce-scatter: in step t the block of the rank t + 1 to the left leaves, that of the rank t + 2 to the left comes.
  ConstBytes partial = input(ring.before(1));
  for (Rank t = 0; t + 1 < size; ++t, ++step) {
    const ConstBytes own = input(ring.before(t + 2));
    const Bytes received = scratch[t % 2].bytes().first(own.size());
    auto sending = net.send(ring.right(), step, partial);
    co_await net.receive(ring.left(), step, received);
    if (t + 2 < size) {
      co_await reduce(net, ring.dtype, ring.reduction, received, own);
      partial = received;
    }
    co_await sending;
  }
  // What came last is this rank's own block, and holds every other rank's share: from here on output may be written.
  const Bytes mine = output(net.rank());
  const Bytes others = scratch[size % 2].bytes().first(mine.size());
  co_await reduce_to(net, ring.dtype, ring.reduction, others, input(net.rank()), mine);
  co_await finish_reduction(net, ring.dtype, ring.reduction, mine);

  // Allgather: in step t the block of the rank t to the left leaves, that of the rank t + 1 to the left comes.
  for (Rank t = 0; t + 1 < size; ++t, ++step) {
    auto sending = net.send(ring.right(), step, output(ring.before(t)));
    co_await net.receive(ring.left(), step, output(ring.before(t + 1)));
    co_await sending;
  }
}

Task<void> run_lane(const Ring& ring, std::size_t lane, std::size_t lanes, std::array<Buffer, 2> scratch) {
  for (std::size_t segment = lane; segment < ring.segments; segment += lanes) {
    co_await run_segment(ring, segment, scratch);
  }
}

}  // namespace

Task<void> allreduce_ring(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Bytes output,
                          RingTuning tuning) {
  TELEGRAD_CHECK(input.size() == output.size() && input.size() % size_of(dtype) == 0);
  if (net.size() == 1) {
    co_await copy(net, input, output);
    co_return;
  }
  Ring ring{net, dtype, reduction, input, output};
  const std::size_t segment_bytes = std::max<std::size_t>(1, tuning.message_bytes) * net.size();
  ring.segments = std::max<std::size_t>(1, (input.size() + segment_bytes - 1) / segment_bytes);
  const std::size_t lanes = std::clamp<std::size_t>(tuning.lanes, 1, ring.segments);

  // The first block of the first segment is a longest one.
  const std::size_t block_bytes =
      part_of(part_of({0, ring.count()}, ring.segments, 0), net.size(), 0).size() * size_of(dtype);
  std::vector<Task<void>> running;
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    std::array<Buffer, 2> scratch{Buffer(block_bytes), Buffer(block_bytes)};
    running.push_back(run_lane(ring, lane, lanes, std::move(scratch)));
  }
  co_await when_all(std::move(running));
}

}  // namespace telegrad
