// Recursive doubling: log2 P (α + n·β + n·γ). Thakur, Rabenseifner, Gropp, "Optimization of collective communication
// operations in MPICH", Int. J. High Performance Computing Applications 19(1), 2005, §4.5 (also for the fold: the
// 2(P − 2^m) first ranks meet in pairs, of which only the even one takes part; it tells the other in the end).
//
// In round i two ranks that differ in bit i exchange their sums and both add them. Both get the same bits because
// a + b = b + a, and by induction so do all 2^(i+1) ranks that have met.
#include "collectives/allreduce_recursive_doubling.hpp"

#include <bit>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "collectives/elements.hpp"

namespace telegrad {

Task<void> allreduce_recursive_doubling(Transport& net, DType dtype, Reduction reduction, ConstBytes input,
                                        Bytes output) {
  TELEGRAD_CHECK(input.size() == output.size() && input.size() % size_of(dtype) == 0);
  const Rank rank = net.rank();
  const Rank size = net.size();
  if (size == 1) {
    co_await copy(net, input, output);
    co_return;
  }
  const Rank members = std::bit_floor(size);  // take part in the doubling
  const Rank pairs = size - members;          // of which only the even rank is a member
  constexpr Step kFold = 0;
  constexpr Step kUnfold = 1;
  constexpr Step kFirstRound = 2;

  if (rank < 2 * pairs && rank % 2 == 1) {
    co_await net.send(rank - 1, kFold, input);
    co_await net.receive(rank - 1, kUnfold, output);
    co_return;
  }

  const Buffer sum(input.size());
  const Buffer received(input.size());
  ConstBytes mine = input;
  if (rank < 2 * pairs) {
    co_await net.receive(rank + 1, kFold, sum.bytes());
    co_await reduce(net, dtype, reduction, sum.bytes(), input);
    mine = sum.bytes();
  }
  const Rank self = rank < 2 * pairs ? rank / 2 : rank - pairs;
  const auto rank_of = [&](Rank member) { return member < pairs ? 2 * member : member + pairs; };
  Step step = kFirstRound;
  for (Rank distance = 1; distance < members; distance *= 2, ++step) {
    const Rank partner = rank_of(self ^ distance);
    auto sending = net.send(partner, step, mine);
    co_await net.receive(partner, step, received.bytes());
    co_await sending;
    const bool last = 2 * distance == members;  // everybody's share is here
    co_await reduce_to(net, dtype, reduction, mine, received.bytes(), last ? output : sum.bytes());
    mine = sum.bytes();
  }
  co_await finish_reduction(net, dtype, reduction, output);
  if (rank < 2 * pairs) co_await net.send(rank + 1, kUnfold, output);
}

}  // namespace telegrad
