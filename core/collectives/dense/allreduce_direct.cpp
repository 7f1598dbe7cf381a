// Reduce-scatter and allgather, each in one round of all with all: 2α + 2(P−1)(o + n/P·β), o being what a message costs the
// processor. Few ranks that share a host wait for each other twice instead of 2·ceil(log2 P) times, which counts most where
// they share cores, too: a rank that waits for another one has to be scheduled again.
//
// An owner adds blocks in pairs, then pairs of these: as many roundings lie behind an element as with halving.
#include "collectives/dense/allreduce_direct.hpp"

#include <deque>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "collectives/support/elements.hpp"
#include "collectives/support/partition.hpp"

namespace telegrad {
namespace {

constexpr Rank kRanksMost = 8;  // more messages take longer than fewer rounds save
constexpr std::size_t kBytesMost = std::size_t{256} << 10;  // longer blocks, all at once, took up to 2.5 times as long
constexpr Step kScatter = 0;
constexpr Step kGather = 1;

// out = all shares, added in pairs, these in pairs, and so on, where the first of two lies: the last is only read. `room`: of
// all but the last, one behind the other.
Task<void> reduce_in_pairs(Transport& net, DType dtype, Reduction reduction, std::vector<Partial> shares, Bytes room,
                           Bytes out) {
  for (std::size_t apart = 1; apart < shares.size(); apart *= 2) {
    for (std::size_t i = 0; i + apart < shares.size(); i += 2 * apart) {
      if (2 * apart >= shares.size()) {
        co_await reduce_last(net, dtype, reduction, shares[i], shares[i + apart], out);
        continue;
      }
      const Bytes sum = room.subspan(i * out.size(), out.size());
      const Rank halvings = shares[i].halvings + 1;
      co_await reduce_partial(net, dtype, reduction, shares[i], shares[i + apart], sum, halvings);
      shares[i] = Partial{sum, halvings};
    }
  }
}

}  // namespace

bool goes_directly(const Transport& net, std::size_t bytes) {
  return net.shares_memory() && net.size() > 2 && net.size() <= kRanksMost && bytes <= kBytesMost;
}

Task<void> allreduce_direct(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Bytes output) {
  TELEGRAD_CHECK(net.size() > 1 && input.size() == output.size() && input.size() % size_of(dtype) == 0);
  const Rank rank = net.rank();
  const Rank size = net.size();
  const Partition partition(input.size() / size_of(dtype), size);
  const auto ahead = [&](Rank distance) { return (rank + distance) % size; };
  const auto behind = [&](Rank distance) { return (rank + size - distance) % size; };
  const Bytes mine = elements(output, dtype, partition[rank]);

  const Buffer others(mine.size() * (size - 1));
  std::vector<Partial> shares;
  std::deque<Transport::Receiving> coming;
  std::deque<Transport::Sending> leaving;
  for (Rank distance = 1; distance < size; ++distance) {
    const Bytes share = others.bytes().subspan(mine.size() * (distance - 1), mine.size());
    coming.emplace_back(net, behind(distance), kScatter, share);
    shares.push_back(Partial{share});
  }
  shares.push_back(Partial{elements(input, dtype, partition[rank])});
  for (Rank distance = 1; distance < size; ++distance) {
    leaving.emplace_back(net, ahead(distance), kScatter, elements(input, dtype, partition[ahead(distance)]));
  }
  for (auto& share : coming) co_await share;
  // What is summed here may be written over once it has left; sums come only then, but may come before that is known.
  for (auto& share : leaving) co_await share;
  coming.clear();
  leaving.clear();
  for (Rank distance = 1; distance < size; ++distance) {
    coming.emplace_back(net, behind(distance), kGather, elements(output, dtype, partition[behind(distance)]));
  }
  co_await reduce_in_pairs(net, dtype, reduction, std::move(shares), others.bytes(), mine);
  for (Rank distance = 1; distance < size; ++distance) leaving.emplace_back(net, ahead(distance), kGather, mine);
  for (auto& sum : coming) co_await sum;
  for (auto& sum : leaving) co_await sum;
}

}  // namespace telegrad
