#include "collectives/topk/short_shares.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "codec/short_share.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/support/exchange_order.hpp"
#include "transport/window.hpp"

namespace telegrad {
namespace {

// Of a share, on average: up to that an index takes fewer bytes here than as it is.
constexpr std::size_t kShortBytes = 2048;
// As they are, if rounding saves less than a header takes.
constexpr std::size_t kShortRoundedBytes = 128;

template <class V>
Task<void> send_shares(Transport& net, const SparseVector<V>& mine, const Partition& slices, SparseTraffic& traffic,
                       Step step) {
  const ExchangeOrder order(net.rank(), net.size());
  Window<SendingShort, kShortWindow> sends;
  for (Rank round = 1; round < net.size(); ++round) {
    const Rank to = order.receiver(round);
    const SparseView<V> share = mine.slice(slices[to].begin, slices[to].end);
    Buffer encoded;
    co_await decide(net, bytes_of(share), [&] { encoded = encode_short(share); });
    traffic.entries_sent += share.nnz();
    if (sends.full()) {
      co_await sends.front().sending;
      sends.pop_front();
    }
    sends.emplace_back(net, to, step, std::move(encoded));
  }
  for (; !sends.empty(); sends.pop_front()) co_await sends.front().sending;
}

// Entries of one rank after another, as they come.
template <class V>
struct TakenShares {
  struct Place {
    std::size_t begin = 0;
    std::size_t end = 0;
  };
  std::vector<Place> places;  // by rank
  std::vector<std::uint32_t> indices;
  std::vector<V> values;

  bool take(Rank source, ConstBytes message, IndexRange range) {
    ShortShareReader<V> reader(message, range);
    places[source].begin = indices.size();
    std::uint32_t index = 0;
    V value{};
    while (!reader.rest().empty()) {
      if (!reader.take(index, value)) return false;
      indices.push_back(index);
      values.push_back(value);
    }
    places[source].end = indices.size();
    return true;
  }
};

template <class V>
Task<void> receive_shares(Transport& net, IndexRange slice, std::uint64_t most, SparseTraffic& traffic, Step step,
                          TakenShares<V>& taken) {
  const ExchangeOrder order(net.rank(), net.size());
  const std::size_t bytes = most_short_bytes<V>(std::min(most, slice.size()));
  Window<Transport::ReceivingAny, kShortWindow> receives;
  Rank begun = 1;
  for (Rank round = 1; round < net.size(); ++round) {
    for (; begun < net.size() && !receives.full(); ++begun) receives.emplace_back(net, order.sender(begun), step, bytes);
    const Buffer share = co_await receives.front();
    receives.pop_front();
    bool is_whole = false;
    co_await decide(net, share.size(), [&] { is_whole = taken.take(order.sender(round), share.bytes(), slice); });
    if (!is_whole) co_await fail_damaged(net, order.sender(round), "entries", kDamagedShort);
  }
  traffic.entries_received += taken.indices.size();
}

// Reads the shares of the ranks from `first` on, as many as `count`, and says where each ends.
template <class V>
Task<void> place_shares(Transport& net, ConstBytes message, Rank first, Rank count, Rank sender, GatheredShares<V>& into,
                        std::vector<std::size_t>& ends, std::size_t before) {
  bool is_whole = true;
  co_await decide(net, message.size(), [&] {
    ConstBytes rest = message;
    for (Rank hops = 0; hops < count && is_whole; ++hops) {
      const Rank owner = (first + hops) % net.size();
      ShortShareReader<V> reader(rest, into.ranges[owner]);
      for (std::size_t i = into.begins[owner]; i < into.begins[owner + 1] && is_whole; ++i) {
        is_whole = reader.take(into.indices[i], into.values[i]);
      }
      rest = reader.rest();
      ends.push_back(before + message.size() - rest.size());
    }
    is_whole = is_whole && rest.empty();
  });
  if (!is_whole) co_await fail_damaged(net, sender, "sums", kDamagedShort);
}

template <class V>
Task<void> gather_by_doubling(Transport& net, const Buffer& mine, GatheredShares<V> into, Step first_step) {
  const Rank rank = net.rank();
  const Rank size = net.size();
  std::vector<std::byte> known(mine.bytes().begin(), mine.bytes().end());  // of the ranks from this one on
  std::vector<std::size_t> ends{known.size()};
  known.reserve(most_short_bytes<V>(into.values.size()));  // nothing moves while it is sent
  Step step = first_step;
  for (Rank have = 1; have < size; ++step) {
    const Rank more = std::min(have, size - have);
    const Rank from = (rank + have) % size;
    std::uint64_t entries = 0;
    for (Rank hops = have; hops < have + more; ++hops) {
      const Rank owner = (rank + hops) % size;
      entries += into.begins[owner + 1] - into.begins[owner];
    }
    auto sending = net.send((rank + size - have) % size, step, ConstBytes(known).first(ends[more - 1]));
    const Buffer message = co_await net.receive_any_size(from, step, most_short_bytes<V>(entries));
    co_await sending;
    co_await place_shares(net, message.bytes(), from, more, from, into, ends, known.size());
    known.insert(known.end(), message.bytes().begin(), message.bytes().end());
    have += more;
  }
}

template <class V>
Task<void> gather_by_ring(Transport& net, Buffer mine, GatheredShares<V> into, Step first_step) {
  const Rank rank = net.rank();
  const Rank size = net.size();
  const Rank left = (rank + size - 1) % size;
  Buffer newest = std::move(mine);
  std::vector<std::size_t> ends;
  for (Rank hop = 0; hop + 1 < size; ++hop) {
    const Rank owner = (left + size - hop) % size;
    const std::size_t entries = into.begins[owner + 1] - into.begins[owner];
    auto sending = net.send((rank + 1) % size, first_step + hop, newest.bytes());
    Buffer next = co_await net.receive_any_size(left, first_step + hop, most_short_bytes<V>(entries));
    co_await sending;
    co_await place_shares(net, next.bytes(), owner, 1, left, into, ends, 0);
    newest = std::move(next);
  }
}

}  // namespace

template <class V>
bool are_short(std::uint64_t entries, Rank ranks, const WireFormat& wire) {
  const bool rounds = wire.values != ValueEncoding::native;
  const std::uint64_t most = std::uint64_t{rounds ? kShortRoundedBytes : kShortBytes} * ranks;
  return entries * (sizeof(std::uint32_t) + sizeof(V)) <= most;
}

template <class V>
Task<OwnedSlice<V>> split_short_shares(Transport& net, const SparseVector<V>& mine, const Partition& slices,
                                       std::uint64_t most, Reduction reduction, SparseTraffic& traffic, Step step) {
  const Rank rank = net.rank();
  const Rank size = net.size();
  const IndexRange slice = slice_of(slices, rank);
  TakenShares<V> taken;
  taken.places.resize(size);
  std::vector<Task<void>> both;
  both.push_back(send_shares(net, mine, slices, traffic, step));
  both.push_back(receive_shares(net, slice, most, traffic, step, taken));
  co_await when_all(std::move(both));
  OwnedSlice<V> sum;
  const SparseView<V> own = mine.slice(slice.begin, slice.end);
  const std::size_t bytes = taken.values.size() * (sizeof(std::uint32_t) + sizeof(V)) + bytes_of(own);
  co_await decide(net, bytes, [&] {
    std::vector<SparseView<V>> shares;
    for (Rank source = 0; source < size; ++source) {
      const auto [begin, end] = taken.places[source];
      shares.push_back(source == rank ? own
                                      : SparseView<V>{slice, false, std::span(taken.indices).subspan(begin, end - begin),
                                                      std::span(taken.values).subspan(begin, end - begin)});
    }
    sum = reduce_slices<V>(shares, reduction, std::numeric_limits<double>::infinity());
    if (reduction == Reduction::avg) scale(sum, 1.0 / size);
  });
  co_return sum;
}

template <class V>
Task<void> gather_short_shares(Transport& net, const SparseView<V>& mine, GatheredShares<V> into, bool doubles,
                               Step first_step) {
  Buffer encoded;
  co_await decide(net, bytes_of(mine), [&] {
    encoded = encode_short(mine);
    const std::size_t begin = into.begins[net.rank()];
    std::ranges::copy(mine.indices, into.indices.begin() + static_cast<std::ptrdiff_t>(begin));
    std::ranges::copy(mine.values, into.values.begin() + static_cast<std::ptrdiff_t>(begin));
  });
  if (doubles) {
    co_await gather_by_doubling(net, encoded, into, first_step);
  } else {
    co_await gather_by_ring(net, std::move(encoded), into, first_step);
  }
}

#define TELEGRAD_INSTANTIATE(V)                                                                                           \
  template bool are_short<V>(std::uint64_t, Rank, const WireFormat&);                                                     \
  template Task<OwnedSlice<V>> split_short_shares(Transport&, const SparseVector<V>&, const Partition&, std::uint64_t,    \
                                                  Reduction, SparseTraffic&, Step);                                       \
  template Task<void> gather_short_shares(Transport&, const SparseView<V>&, GatheredShares<V>, bool, Step);
TELEGRAD_FOR_FLOAT_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
