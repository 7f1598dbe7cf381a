// Recursive doubling of a few integers: log2 P (α + n·β), and two messages more for the ranks beyond a power of two. See
// allreduce_recursive_doubling.cpp, which knows one reduction for all elements.
#include "collectives/support/allreduce_counts.hpp"

#include <algorithm>
#include <bit>
#include <vector>

#include "base/check.hpp"

namespace telegrad {
namespace {

constexpr Step kFold = 0;
constexpr Step kUnfold = 1;
constexpr Step kFirstRound = 2;

}  // namespace

Task<void> allreduce_counts(Transport& net, std::span<std::uint64_t> counts, std::size_t maxima, SparseTraffic& traffic,
                            Step first_step) {
  TELEGRAD_CHECK(maxima <= counts.size());
  const Rank rank = net.rank();
  const Rank members = std::bit_floor(net.size());
  const Rank pairs = net.size() - members;  // of ranks, of which only the even one is a member
  const std::size_t sums = counts.size() - maxima;
  const Bytes mine = std::as_writable_bytes(counts);
  std::vector<std::uint64_t> others(counts.size());
  const Bytes theirs = std::as_writable_bytes(std::span(others));
  const auto add = [&] {
    for (std::size_t i = 0; i < sums; ++i) counts[i] += others[i];
    for (std::size_t i = sums; i < counts.size(); ++i) counts[i] = std::max(counts[i], others[i]);
  };
  const auto sent = [&] { traffic.control_bytes_sent += mine.size(); };
  const auto received = [&] { traffic.control_bytes_received += mine.size(); };

  const bool folded = rank < 2 * pairs;
  if (folded && rank % 2 == 1) {
    co_await net.send(rank - 1, first_step + kFold, mine);
    sent();
    co_await net.receive(rank - 1, first_step + kUnfold, mine);
    received();
    co_return;
  }
  if (folded) {
    co_await net.receive(rank + 1, first_step + kFold, theirs);
    received();
    co_await net.compute(mine.size(), add);
  }
  const Rank self = folded ? rank / 2 : rank - pairs;
  Step step = first_step + kFirstRound;
  for (Rank distance = 1; distance < members; distance *= 2, ++step) {
    const Rank member = self ^ distance;
    const Rank partner = member < pairs ? 2 * member : member + pairs;
    auto sending = net.send(partner, step, mine);
    co_await net.receive(partner, step, theirs);
    co_await sending;
    sent();
    received();
    co_await net.compute(mine.size(), add);
  }
  if (folded) {
    co_await net.send(rank + 1, first_step + kUnfold, mine);
    sent();
  }
}

}  // namespace telegrad
