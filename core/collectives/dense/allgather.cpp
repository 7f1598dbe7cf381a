#include "collectives/dense/allgather.hpp"

#include <utility>

#include "base/check.hpp"
#include "collectives/dense/allgather_bruck.hpp"
#include "collectives/dense/allgather_ring.hpp"
#include "collectives/support/elements.hpp"

namespace telegrad {
namespace {

// Up to so many bytes in a block, on average, saving messages is worth copying everything once more: where α/γ is some
// 30 KB (3 µs at 10 GB/s).
constexpr std::size_t kShortBytes = std::size_t{32} << 10;

Task<void> gather_short(Transport& net, ConstBytes mine, Bytes all, Partition blocks, TakePart take) {
  co_await allgather_bruck(net, mine, all, blocks);
  if (!take) co_return;
  for (Rank owner = 0; owner < net.size(); ++owner) {
    if (owner != net.rank() && blocks[owner].size() > 0) co_await take(owner, blocks[owner]);
  }
}

}  // namespace

Task<void> allgather(Transport& net, ConstBytes mine, Bytes all, Partition blocks, TakePart take) {
  TELEGRAD_CHECK(blocks.blocks() == net.size() && all.size() == blocks.count());
  TELEGRAD_CHECK(mine.size() == blocks[net.rank()].size());
  if (net.size() == 1) return copy(net, mine, all);
  const bool few = net.size() == 2 && blocks.alike() && !mine.empty();  // one message either way
  if (!few && all.size() <= net.size() * kShortBytes) {
    return gather_short(net, mine, all, std::move(blocks), std::move(take));
  }
  return allgather_ring(net, mine, all, std::move(blocks), std::move(take));
}

}  // namespace telegrad
