// Ring allgather: (P−1)(α + n·β). Each rank passes on to the right what it last received from the left.
// Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", Int. J. High Performance
// Computing Applications 19(1), 2005, §4.1.
//
// Until a rank has heard from all others, it receives into scratch. A barrier beside the ring sees to it that this ends
// after about log2 P blocks; the rest are received where they belong.
#include "collectives/allgather.hpp"

#include <utility>

#include "base/check.hpp"
#include "collectives/barrier.hpp"
#include "collectives/elements.hpp"

namespace telegrad {
namespace {

Task<void> hear_from_all(Transport& net, Step first_step, bool& heard) {
  co_await barrier(net, first_step);
  heard = true;
}

Task<void> pass_on(Transport& net, ConstBytes mine, Bytes all, const bool& heard) {
  const Rank rank = net.rank();
  const Rank size = net.size();
  const Rank left = (rank + size - 1) % size;
  const Rank right = (rank + 1) % size;
  const auto block = [&](Rank owner) { return all.subspan(owner * mine.size(), mine.size()); };

  std::vector<Buffer> early;  // early[t]: the block of rank − 1 − t
  ConstBytes newest = mine;
  for (Step t = 0; t + 1 < size; ++t) {
    // The last block comes through all other ranks.
    const bool may_write = heard || t + 2 == size;
    if (!may_write) early.emplace_back(mine.size());
    const Bytes into = may_write ? block((rank + size - 1 - t) % size) : early.back().bytes();
    auto sending = net.send(right, t, newest);
    co_await net.receive(left, t, into);
    co_await sending;
    newest = into;
  }
  for (Rank t = 0; t < early.size(); ++t) co_await copy(net, early[t].bytes(), block((rank + size - 1 - t) % size));
  co_await copy(net, mine, block(rank));
}

}  // namespace

Task<void> allgather(Transport& net, ConstBytes mine, Bytes all) {
  TELEGRAD_CHECK(all.size() == net.size() * mine.size());
  bool heard = net.size() == 1;
  std::vector<Task<void>> both;
  both.push_back(hear_from_all(net, net.size(), heard));
  both.push_back(pass_on(net, mine, all, heard));
  co_await when_all(std::move(both));
}

Task<KeptMessages> allgather_any_size(Transport& net, Buffer mine, std::size_t most_bytes, Step first_step) {
  const Rank rank = net.rank();
  const Rank size = net.size();
  const Rank left = (rank + size - 1) % size;
  const Rank right = (rank + 1) % size;

  KeptMessages all;
  ConstBytes newest = all.add(rank, std::move(mine));
  for (Rank t = 0; t + 1 < size; ++t) {
    auto sending = net.send(right, first_step + t, newest);
    Buffer next = co_await net.receive_any_size(left, first_step + t, most_bytes);
    newest = all.add((rank + size - 1 - t) % size, std::move(next));
    co_await sending;
  }
  co_return all;
}

}  // namespace telegrad
