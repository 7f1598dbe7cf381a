// Bruck's allgather: ceil(log2 P)·α + (P−1)·n·β, for any P. Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for
// all-to-all communications in multiport message-passing systems", IEEE Transactions on Parallel and Distributed Systems
// 8(11), 1997, §4.
//
// In the round that begins with the blocks of h ranks, a rank's own and those behind it, they (or as many as are missing)
// go to the rank h before, and those of the rank h behind come. All lies in scratch until the last round, after which this
// rank has heard from all.
#include "collectives/dense/allgather_bruck.hpp"

#include <algorithm>

#include "collectives/support/elements.hpp"

namespace telegrad {

Task<void> allgather_bruck(Transport& net, ConstBytes mine, Bytes all, Partition blocks, Step first_step) {
  const Rank rank = net.rank();
  const Rank size = net.size();
  const Buffer scratch(all.size());
  // Where the block of the rank `hops` behind begins in scratch.
  const auto place = [&](Rank hops) {
    if (hops == size) return blocks.count();
    const Rank owner = (rank + hops) % size;
    return blocks[owner].begin + (owner < rank ? blocks.count() : 0) - blocks[rank].begin;
  };
  const auto between = [&](Rank first, Rank last) {
    return scratch.bytes().subspan(place(first), place(last) - place(first));
  };

  Step step = first_step;
  for (Rank have = 1; have < size; ++step) {
    const Rank more = std::min(have, size - have);
    const ConstBytes known = have == 1 ? mine : ConstBytes(between(0, more));
    auto sending = net.send((rank + size - have) % size, step, known);
    auto receiving = net.receive((rank + have) % size, step, between(have, have + more));
    if (have == 1) co_await copy(net, mine, between(0, 1));
    co_await receiving;
    co_await sending;
    have += more;
  }
  const std::size_t before = blocks[rank].begin;
  const std::size_t behind = all.size() - before;
  co_await copy(net, scratch.bytes().first(behind), all.subspan(before));
  co_await copy(net, scratch.bytes().subspan(behind), all.first(before));
}

}  // namespace telegrad
