// Recursive halving on a circulant graph: ceil(log2 P) α + (P−1)/P·n(β + γ) for any P. Träff, "Optimal, non-pipelined
// reduce-scatter and allreduce algorithms", arXiv:2410.14234, 2024, §2. Where P is a power of two that is the cost of
// Rabenseifner's halving, and where it is none no ranks are folded and unfolded. Every rank sends to one and receives
// from another, so that only the first round of an even P is an exchange between two.
//
// Seen from rank r, blocks are counted from its own, which is 0. In a round a rank that has `reach` blocks left sends
// the rear half of them to the rank `distance` = ceil(reach/2) ahead, from which they lie as near as `reach` − 1 −
// `distance`; what it gets is for its front half. In the end its own block is left.
//
// Long messages are cut in pieces.
#include "collectives/support/halving.hpp"

#include <algorithm>
#include <array>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "collectives/support/elements.hpp"
#include "collectives/support/pieces.hpp"

namespace telegrad {
namespace {

class Halving {
 public:
  Halving(Transport& net, DType dtype, Reduction reduction, ConstBytes input, const Partition& partition, Bytes mine)
      : net_(net), dtype_(dtype), reduction_(reduction), input_(input), partition_(partition), mine_(mine) {}

  Task<void> run() {
    const Rank rounds = halving_rounds(net_.size());
    for (Rank round = 0; round < rounds; ++round) co_await run_round(round, round + 1 == rounds);
  }

 private:
  // A rank's blocks [first, first + length), counted from its own.
  Arc arc(Rank first, Rank length) const { return {partition_, (net_.rank() + first) % net_.size(), length}; }
  std::size_t bytes(std::size_t elements) const { return elements * size_of(dtype_); }

  Task<void> run_round(Rank number, bool last) {
    const HalvingRound round = halving_round(net_.size(), number);
    const bool first = number == 0;
    const Rank to = (net_.rank() + round.distance) % net_.size();
    const Rank from = (net_.rank() + net_.size() - round.distance) % net_.size();
    const Arc leaving = arc(round.distance, round.blocks());
    const Arc coming = arc(0, round.blocks());
    const std::size_t pieces = pieces_of(net_, partition_, dtype_, round.blocks());
    const std::size_t held = arc(0, round.distance).size();  // before what leaves, and all that is left afterwards
    Buffer& into = first ? partial_ : received_;
    if (first) partial_ = Buffer(bytes(held));
    if (number == 1) received_ = Buffer(bytes(coming.size()));

    const auto begin_piece = [&](PieceExchange& exchange, std::size_t piece) {
      const auto step = [&](std::size_t part) { return step_of(number, piece, part); };
      const Range out = part_of({0, leaving.size()}, pieces, piece);
      const Range in = part_of({0, coming.size()}, pieces, piece);
      if (!first) {
        exchange.receive(from, step(0), slice(into, in));
        exchange.send(to, step(0), slice(partial_, {held + out.begin, held + out.end}));
        return;
      }
      // The input begins and ends somewhere in the middle: what lies around its end goes in two messages.
      const auto parts = coming.ranges(in);
      const std::size_t middle = in.begin + parts[0].size();
      exchange.receive(from, step(0), slice(into, {in.begin, middle}));
      if (parts[1].size() > 0) exchange.receive(from, step(1), slice(into, {middle, in.end}));
      const auto sent = leaving.ranges(out);
      exchange.send(to, step(0), elements(input_, dtype_, sent[0]));
      if (sent[1].size() > 0) exchange.send(to, step(1), elements(input_, dtype_, sent[1]));
    };
    PieceExchange exchange(net_, pieces, begin_piece);
    // Of an odd number of blocks the one in the middle meets no other in this round.
    if (round.blocks() < round.distance) {
      const Range middle = partition_[(net_.rank() + round.blocks()) % net_.size()];
      const Bytes kept = slice(partial_, {coming.size(), held});
      const Partial before{first ? elements(input_, dtype_, middle) : ConstBytes(kept), number};
      co_await keep_partial(net_, dtype_, reduction_, before, kept, number + 1);
    }
    for (std::size_t piece = 0; piece < pieces; ++piece) {
      const Range in = part_of({0, coming.size()}, pieces, piece);
      co_await exchange.take();
      if (!first) {
        const Partial here{slice(partial_, in), number};
        const Partial there{slice(into, in), number};
        co_await meet(here, there, last ? elements(mine_, dtype_, in) : slice(partial_, in), number, last);
        continue;
      }
      std::size_t begin = in.begin;
      for (const Range& part : coming.ranges(in)) {
        const Range here{begin, begin + part.size()};
        const Partial own{elements(input_, dtype_, part)};
        const Partial other{slice(into, here)};
        co_await meet(own, other, last ? elements(mine_, dtype_, here) : slice(into, here), number, last);
        begin = here.end;
      }
    }
    co_await exchange.finish();
  }

  Task<void> meet(Partial here, Partial there, Bytes out, Rank round, bool last) {
    return last ? reduce_last(net_, dtype_, reduction_, here, there, out)
                : reduce_partial(net_, dtype_, reduction_, here, there, out, round + 1);
  }

  Bytes slice(const Buffer& buffer, Range range) const { return elements(buffer.bytes(), dtype_, range); }

  Transport& net_;
  const DType dtype_;
  const Reduction reduction_;
  const ConstBytes input_;
  const Partition& partition_;
  const Bytes mine_;
  Buffer partial_;   // of the blocks that are left, this rank's first
  Buffer received_;  // what is to be added to them, after the first round
};

}  // namespace

std::size_t pieces_of(const Transport& net, const Partition& partition, DType dtype, Rank blocks) {
  return std::min(kPiecesMost, pieces_of(net, partition.count() * size_of(dtype) * blocks / partition.blocks()));
}

Task<void> halve(Transport& net, DType dtype, Reduction reduction, ConstBytes input, const Partition& partition,
                 Bytes mine) {
  TELEGRAD_CHECK(net.size() > 1 && partition.blocks() == net.size() &&
                 input.size() == partition.count() * size_of(dtype) &&
                 mine.size() == partition[net.rank()].size() * size_of(dtype));
  Halving halving(net, dtype, reduction, input, partition, mine);
  co_await halving.run();
}

}  // namespace telegrad
