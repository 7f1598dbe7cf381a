// Reduce-scatter and allgather, each in one round of all with all: 2α + 2(P−1)(o + n/P·β), o being what a message costs the
// processor. Few ranks that share a host wait for each other twice instead of 2·ceil(log2 P) times, which counts most where
// they share cores, too: a rank that waits for another one has to be scheduled again.
//
// An owner adds blocks in pairs, then pairs of these: as many roundings lie behind an element as with halving.
#include "collectives/allreduce_direct.hpp"

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "collectives/elements.hpp"
#include "collectives/partition.hpp"

namespace telegrad {
namespace {

constexpr Rank kRanksMost = 8;  // more messages take longer than fewer rounds save
constexpr std::size_t kBytesMost = std::size_t{256} << 10;  // longer blocks, all under way at once, take up to 2.5 times as long
constexpr Step kScatter = 0;
constexpr Step kGather = 1;

// out = all shares, added in pairs; `shares` but the first lie in memory that may be written.
Task<void> reduce_in_pairs(Transport& net, DType dtype, Reduction reduction, std::vector<Partial> shares,
                           std::vector<Bytes> places, Bytes out) {
  while (shares.size() > 2) {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < shares.size(); i += 2, ++kept) {
      if (i + 1 == shares.size()) {
        shares[kept] = shares[i];
        places[kept] = places[i];
        continue;
      }
      const Bytes place = places[i + 1];
      const Rank halvings = std::max(shares[i].halvings, shares[i + 1].halvings) + 1;
      co_await reduce_partial(net, dtype, reduction, shares[i], shares[i + 1], place, halvings);
      shares[kept] = Partial{place, halvings};
      places[kept] = place;
    }
    shares.resize(kept);
    places.resize(kept);
  }
  co_await reduce_last(net, dtype, reduction, shares[0], shares[1], out);
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
  std::vector<Partial> shares{Partial{elements(input, dtype, partition[rank])}};
  std::vector<Bytes> places{Bytes{}};  // of the first nothing is written: it is combined into the second's
  std::deque<Transport::Receiving> coming;
  std::deque<Transport::Sending> leaving;
  for (Rank distance = 1; distance < size; ++distance) {
    const Bytes place = others.bytes().subspan(mine.size() * (distance - 1), mine.size());
    coming.emplace_back(net, behind(distance), kScatter, place);
    shares.push_back(Partial{place});
    places.push_back(place);
  }
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
  co_await reduce_in_pairs(net, dtype, reduction, std::move(shares), std::move(places), mine);
  for (Rank distance = 1; distance < size; ++distance) leaving.emplace_back(net, ahead(distance), kGather, mine);
  for (auto& sum : coming) co_await sum;
  for (auto& sum : leaving) co_await sum;
}

}  // namespace telegrad
