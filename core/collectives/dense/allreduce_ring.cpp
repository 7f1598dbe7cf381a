// Ring allreduce: 2(P−1)α + 2(P−1)/P·nβ + (P−1)/P·nγ. Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for
// clusters of workstations", J. Parallel and Distributed Computing 69(2), 2009, §4.
//
// Block b travels to the right from rank b + 1 round to rank b, and every rank adds its own share: b then holds the sum
// and owns it. The owners' blocks travel round once more. Long vectors are cut into segments, each with a ring of its
// own; a few of them (lanes) are on their way at once, so that one adds while others send and receive.
#include "collectives/dense/allreduce_ring.hpp"

#include "base/check.hpp"
#include "collectives/support/elements.hpp"

namespace telegrad {
namespace {

Task<void> run_segment(const Ring& ring, std::size_t segment, LaneScratch& scratch, Bytes whole) {
  Transport& net = ring.net;
  const Rank size = net.size();
  const auto output = [&](Rank block) { return elements(whole, ring.dtype, ring.piece(block, segment)); };
  Step step = static_cast<Step>(segment) * 2 * (size - 1);
  co_await ring_reduce_scatter(ring, segment, step, scratch, output(net.rank()));
  step += size - 1;

  // Allgather: in step t the block of the rank t to the left leaves, that of the rank t + 1 to the left comes.
  for (Rank t = 0; t + 1 < size; ++t, ++step) {
    auto sending = net.send(ring.right(), step, output(ring.before(t)));
    co_await net.receive(ring.left(), step, output(ring.before(t + 1)));
    co_await sending;
  }
}

}  // namespace

Task<void> allreduce_ring(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Bytes output,
                          LaneTuning tuning, InputMaker* maker) {
  TELEGRAD_CHECK(input.size() == output.size() && input.size() % size_of(dtype) == 0);
  if (net.size() == 1) {
    if (maker != nullptr) {
      co_await maker->make({0, output.size() / size_of(dtype)}, output);
    } else {
      co_await copy(net, input, output);
    }
    co_return;
  }
  const Ring ring(net, dtype, reduction, input, Partition(input.size() / size_of(dtype), net.size()), tuning, maker);
  co_await run_lanes(ring.lanes, ring.longest_piece_bytes(), [&ring, output](std::size_t segment, LaneScratch& scratch) {
    return run_segment(ring, segment, scratch, output);
  });
}

}  // namespace telegrad
