// Ring allgather: (P−1)(α + n·β). Each rank passes on to the right what comes from the left. Thakur, Rabenseifner, Gropp,
// "Optimization of collective communication operations in MPICH", Int. J. High Performance Computing Applications 19(1),
// 2005, §4.1.
//
// Blocks travel in pieces, each of which is passed on as soon as it has come, and the next one is on its way meanwhile:
// so one long block among short ones is a pipeline too. Nothing is received before a barrier has told that all ranks have
// called; the first pieces leave beside it.
#include "collectives/dense/allgather_ring.hpp"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "collectives/dense/barrier.hpp"
#include "collectives/support/elements.hpp"
#include "collectives/support/pieces.hpp"
#include "transport/milestone.hpp"
#include "transport/window.hpp"

namespace telegrad {
namespace {

// Within a host, and over a network where a block is very long: pieces that are a little longer than a card's are slow.
constexpr std::size_t kPieceBytesInMemory = std::size_t{256} << 10;
constexpr std::size_t kLongPieceBytes = std::size_t{512} << 10;
constexpr std::size_t kCardPiecesMost = 64;
constexpr std::size_t kPiecesMost = 16;  // of a block as long as all others: more would hide no more
constexpr std::size_t kUnderWay = 2;  // pieces, in each direction
constexpr Step kBarrierSteps = 32;    // those of the pieces come after them

// One long block among short ones is a pipeline of as many stages as there are ranks: it needs many pieces.
std::size_t pieces_of(const Transport& net, const Partition& blocks, Range block) {
  const auto pieces_in = [&](std::size_t bytes) { return (block.size() + bytes - 1) / bytes; };
  const bool alike = blocks.alike();
  if (net.shares_memory()) {
    const std::size_t pieces = pieces_in(kPieceBytesInMemory);
    return alike ? std::min(pieces, kPiecesMost) : pieces;
  }
  const std::size_t pieces = pieces_in(kCardBytes);
  return alike && pieces > kCardPiecesMost ? std::min(pieces_in(kLongPieceBytes), kPiecesMost) : pieces;
}

// The pieces of the blocks of the ranks `first_hop` … `last_hop` − 1 to the left of this one, nearest first: the order in
// which they travel.
class Pieces {
 public:
  Pieces(const Transport& net, const Partition& blocks, Rank first_hop, Rank last_hop)
      : net_(net), blocks_(blocks), hop_(first_hop), last_hop_(last_hop) {}

  std::optional<Range> next() {
    for (; hop_ < last_hop_; ++hop_, piece_ = 0) {
      const Range block = blocks_[owner()];
      const std::size_t pieces = pieces_of(net_, blocks_, block);
      if (piece_ < pieces) return part_of(block, pieces, piece_++);
    }
    return std::nullopt;
  }
  /// Of the piece that next() gave last.
  Rank owner() const { return (net_.rank() + net_.size() - hop_) % net_.size(); }

 private:
  const Transport& net_;
  const Partition& blocks_;
  Rank hop_;
  Rank last_hop_;
  std::size_t piece_ = 0;
};

struct Ring {
  Transport& net;
  ConstBytes mine;
  Bytes all;
  Partition blocks;
  TakePart taking;
  Milestone arrived;  // pieces from the left
  Milestone to_take;  // the same, for whoever uses them

  Range own() const { return blocks[net.rank()]; }
  Bytes bytes(Range range) const { return all.subspan(range.begin, range.size()); }
  // What comes comes from the only other rank, and something does.
  bool other_tells() const {
    return net.size() == 2 && blocks[0].size() > 0 && blocks[1].size() > 0;
  }
};

Task<void> pass_on(Ring& ring) {
  Transport& net = ring.net;
  const Rank right = (net.rank() + 1) % net.size();
  const std::size_t own = pieces_of(net, ring.blocks, ring.own());
  Pieces pieces(net, ring.blocks, 0, net.size() - 1);
  Window<Transport::Sending, kUnderWay> sends;
  Step step = kBarrierSteps;
  for (std::size_t index = 0; const auto piece = pieces.next(); ++index, ++step) {
    if (index >= own) co_await ring.arrived.until(index - own + 1);
    if (sends.full()) {
      co_await sends.front();
      sends.pop_front();
    }
    const ConstBytes bytes = index < own ? ring.mine.subspan(piece->begin - ring.own().begin, piece->size())
                                         : ConstBytes(ring.bytes(*piece));
    sends.emplace_back(net, right, step, bytes);
  }
  for (; !sends.empty(); sends.pop_front()) co_await sends.front();
}

Task<void> take(Ring& ring) {
  Transport& net = ring.net;
  const Rank left = (net.rank() + net.size() - 1) % net.size();
  Pieces pieces(net, ring.blocks, 1, net.size());
  Window<Transport::Receiving, kUnderWay> receives;
  Step step = kBarrierSteps;
  for (std::size_t arrived = 0;;) {
    while (!receives.full()) {
      const auto piece = pieces.next();
      if (!piece) break;
      receives.emplace_back(net, left, step++, ring.bytes(*piece));
    }
    if (receives.empty()) break;
    co_await receives.front();
    receives.pop_front();
    ring.arrived.reach(++arrived);
    ring.to_take.reach(arrived);
  }
}

Task<void> use_pieces(Ring& ring) {
  Pieces pieces(ring.net, ring.blocks, 1, ring.net.size());
  std::size_t taken = 0;
  while (const auto piece = pieces.next()) {
    co_await ring.to_take.until(++taken);
    co_await ring.taking(pieces.owner(), *piece);
  }
}

Task<void> copy_own(Ring& ring) {
  if (ring.other_tells()) co_await ring.arrived.until(1);
  co_await copy(ring.net, ring.mine, ring.bytes(ring.own()));
}

Task<void> take_when_all_have_called(Ring& ring) {
  if (!ring.other_tells()) co_await barrier(ring.net);
  std::vector<Task<void>> both;
  both.push_back(take(ring));
  both.push_back(copy_own(ring));
  co_await when_all(std::move(both));
}

}  // namespace

Task<void> allgather_ring(Transport& net, ConstBytes mine, Bytes all, Partition blocks, TakePart take) {
  Ring ring{net, mine, all, std::move(blocks), std::move(take), Milestone(net.ready()), Milestone(net.ready())};
  std::vector<Task<void>> together;
  together.push_back(take_when_all_have_called(ring));
  together.push_back(pass_on(ring));
  if (ring.taking) together.push_back(use_pieces(ring));
  co_await when_all(std::move(together));
}

}  // namespace telegrad
