// Recursive doubling: log2 P (α + n·β + n·γ). Thakur, Rabenseifner, Gropp, "Optimization of collective communication
// operations in MPICH", Int. J. High Performance Computing Applications 19(1), 2005, §4.5 (also for the fold: the
// 2(P − 2^m) first ranks meet in pairs, of which only the even one takes part; it tells the other in the end).
//
// In round i two ranks that differ in bit i exchange their sums and both add them. Both get the same bits because
// a + b = b + a, and by induction so do all 2^(i+1) ranks that have met.
//
// Long vectors go through the rounds in segments, in lanes: one adds while another is exchanged, and two ranks that send
// each other short messages keep both directions of a link busier than with long ones. Not where ranks are folded: these
// begin late, and lanes that are out of step wait for each other longer than they gain.
#include "collectives/dense/allreduce_recursive_doubling.hpp"

#include <bit>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "collectives/support/elements.hpp"

namespace telegrad {
namespace {

constexpr Step kFold = 0;
constexpr Step kUnfold = 1;
constexpr Step kFirstRound = 2;

struct Doubling {
  Transport& net;
  DType dtype;
  Reduction reduction;
  Rank members;  // take part in the doubling
  Rank pairs;    // of which only the even rank is a member

  Rank self() const { return net.rank() < 2 * pairs ? net.rank() / 2 : net.rank() - pairs; }
  Rank rank_of(Rank member) const { return member < pairs ? 2 * member : member + pairs; }
  /// How often what a member has before its first round is halved, and afterwards what all have.
  Rank halvings_before(Rank member) const { return member < pairs ? 1 : 0; }
  Rank halvings_after(Rank rounds) const { return rounds + (pairs > 0 ? 1 : 0); }
};

Task<void> run_rounds(const Doubling& doubling, ConstBytes mine, Bytes output, Step step, LaneScratch& scratch) {
  const auto& [net, dtype, reduction, members, pairs] = doubling;
  const Bytes sum = scratch[0].bytes().first(mine.size());
  const Bytes received = scratch[1].bytes().first(mine.size());
  Partial here{mine, doubling.halvings_before(doubling.self())};
  Partial there{received, doubling.halvings_before(doubling.self() ^ 1)};
  for (Rank distance = 1, round = 1; distance < members; distance *= 2, ++round, ++step) {
    const Rank partner = doubling.rank_of(doubling.self() ^ distance);
    auto sending = net.send(partner, step, here.values);
    co_await net.receive(partner, step, received);
    co_await sending;
    if (2 * distance == members) {  // everybody's share is here
      co_await reduce_last(net, dtype, reduction, here, there, output);
      break;
    }
    const Rank halvings = doubling.halvings_after(round);
    co_await reduce_partial(net, dtype, reduction, here, there, sum, halvings);
    here = Partial{sum, halvings};
    there.halvings = halvings;
  }
}

}  // namespace

Task<void> allreduce_recursive_doubling(Transport& net, DType dtype, Reduction reduction, ConstBytes input,
                                        Bytes output, LaneTuning tuning) {
  TELEGRAD_CHECK(input.size() == output.size() && input.size() % size_of(dtype) == 0);
  const Rank rank = net.rank();
  const Rank size = net.size();
  if (size == 1) {
    co_await copy(net, input, output);
    co_return;
  }
  const Rank members = std::bit_floor(size);
  const Doubling doubling{net, dtype, reduction, members, size - members};
  const bool folded = rank < 2 * doubling.pairs;
  if (folded && rank % 2 == 1) {
    co_await net.send(rank - 1, kFold, input);
    co_await net.receive(rank - 1, kUnfold, output);
    co_return;
  }

  const Buffer both(folded ? input.size() : 0);
  ConstBytes mine = input;
  if (folded) {
    co_await net.receive(rank + 1, kFold, both.bytes());
    const Partial others{both.bytes()};
    const Partial own{input};
    co_await reduce_partial(net, dtype, reduction, others, own, both.bytes(), doubling.halvings_before(doubling.self()));
    mine = both.bytes();
  }
  const Lanes lanes(net, mine.size(), tuning);
  if (doubling.pairs > 0 || lanes.segments == 1) {  // without lanes: of short vectors latency counts
    LaneScratch scratch{Buffer(mine.size()), Buffer(mine.size())};
    co_await run_rounds(doubling, mine, output, kFirstRound, scratch);
  } else {
    const auto segment_of = [&, whole = Range{0, mine.size() / size_of(dtype)}](std::size_t segment) {
      return part_of(whole, lanes.segments, segment);
    };
    const Step rounds = static_cast<Step>(std::countr_zero(members));
    co_await run_lanes(lanes, segment_of(0).size() * size_of(dtype), [&](std::size_t segment, LaneScratch& scratch) {
      const Range range = segment_of(segment);
      return run_rounds(doubling, elements(mine, dtype, range), elements(output, dtype, range),
                        kFirstRound + static_cast<Step>(segment) * rounds, scratch);
    });
  }
  if (folded) co_await net.send(rank + 1, kUnfold, output);
}

}  // namespace telegrad
