// Sparse allreduce by split and allgather: 2(P−1)α + (k + K)(P−1)/P·β for evenly spread entries. Renggli et al.,
// "SparCML: high-performance sparse communication for machine learning", SC 2019, §5.3.2 (SSAR_Split_allgather), and
// §5.3.3 for slices that go dense.
//
// Each rank owns one slice of the index range. Every rank sends every owner its entries of that slice, the next rank
// first, so that no owner is everybody's first. The owner adds them in the order of ranks and encodes the sum once; the
// encoded slices go round a ring, and everybody, the owner too, decodes the same bytes.
#include "collectives/allreduce_split_allgather.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "collectives/allgather.hpp"
#include "collectives/blocks.hpp"
#include "collectives/kept_messages.hpp"
#include "sparse/counted.hpp"
#include "sparse/slices.hpp"
#include "sparse/wire.hpp"
#include "transport/window.hpp"

namespace telegrad {
namespace {

constexpr Step kSplit = 0;
constexpr Step kGather = 1;
constexpr Rank kWindow = 16;  // messages of the split under way in one direction
constexpr std::size_t kBatchBytes = Transport::kTurnBytes;  // of small pieces that are encoded or decoded in one go
constexpr double kNever = std::numeric_limits<double>::infinity();

IndexRange slice_of(std::uint64_t dimension, Rank size, Rank owner) {
  const Range part = part_of({0, static_cast<std::size_t>(dimension)}, size, owner);
  return {part.begin, part.end};
}

// No encoding of this range is longer: at worst every element is an entry with an index of 4 bytes. Two sections are
// padded to 8 bytes.
template <class V>
std::size_t most_bytes(IndexRange range) {
  return sizeof(StreamHeader) + static_cast<std::size_t>(range.size()) * (4 + sizeof(V)) + 16;
}

// On the wire an index of a slice that is nearly dense has 2 bytes, in memory 4.
template <class V>
double wire_delta(IndexRange range, double switch_factor) {
  return switch_entries(range.size(), sizeof(V), 2, switch_factor);
}
template <class V>
double memory_delta(std::uint64_t dimension, double switch_factor) {
  return switch_entries(dimension, sizeof(V), 4, switch_factor);
}

template <class V>
Buffer encode_share(const StreamView<V>& share, Reduction reduction, double switch_factor) {
  const bool stays = share.dense || static_cast<double>(share.nnz()) <= wire_delta<V>(share.range, switch_factor);
  if (stays) return encode(share);
  const OwnedSlice<V> dense = dense_slice(share, reduction);
  return encode(dense.view());
}

// Here contents decide what is sent next: so this work also runs where that of other collectives is left out.
template <class Work>
Transport::Computing decide(Transport& net, std::size_t bytes, Work&& work) {
  work();
  return net.compute(bytes, [] {});
}

bool same_message(ConstBytes a, ConstBytes b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), SizeOnly::there(a.size())) == 0;
}

// All ranks' messages, decoded in batches between which the network has its turn. Views lie in the messages.
template <class V, class Decode>
Task<std::vector<Decoded<V>>> decode_all(Transport& net, const std::vector<ConstBytes>& messages,
                                         const char* content, Decode decode) {
  const Rank size = net.size();
  std::vector<Decoded<V>> decoded;
  decoded.reserve(size);
  for (Rank end = 0; end < size;) {
    const Rank begin = end;
    std::size_t bytes = 0;
    for (; end < size && bytes < kBatchBytes; ++end) bytes += messages[end].size();
    co_await decide(net, bytes, [&] {
      for (Rank source = begin; source < end; ++source) decoded.push_back(decode(source));
    });
    for (Rank source = begin; source < end; ++source) {
      if (decoded[source].ok()) continue;
      co_await net.fail(source, "rank " + std::to_string(source) + " sent damaged " + content + ": " +
                                    decoded[source].error());
    }
  }
  co_return decoded;
}

template <class V>
std::vector<StreamView<V>> views_of(std::span<const Decoded<V>> decoded) {
  std::vector<StreamView<V>> views;
  views.reserve(decoded.size());
  for (const auto& one : decoded) views.push_back(one.view());
  return views;
}

// The reduction of the ranks' shares of one range, in the order of ranks; in parts of the range, between which the
// network has its turn.
template <class V>
Task<OwnedSlice<V>> reduce_shares(Transport& net, std::vector<StreamView<V>> shares, Reduction reduction,
                                  double delta) {
  std::size_t bytes = 0;
  for (const auto& share : shares) bytes += bytes_of(share);
  const Range whole{static_cast<std::size_t>(shares[0].range.begin), static_cast<std::size_t>(shares[0].range.end)};
  const std::size_t parts = bytes / Transport::kSliceBytes + 1;

  OwnedSlice<V> sum;
  if (parts == 1) {
    co_await decide(net, bytes, [&] { sum = reduce_slices<V>(shares, reduction, delta); });
    co_return sum;
  }
  std::vector<OwnedSlice<V>> sums(parts);
  std::vector<StreamView<V>> views;
  std::vector<StreamView<V>> within;
  for (std::size_t part = 0; part < parts; ++part) {
    const Range range = part_of(whole, parts, part);
    within.clear();
    bytes = 0;
    for (const auto& share : shares) {
      within.push_back(share.slice({range.begin, range.end}));
      bytes += bytes_of(within.back());
    }
    co_await decide(net, bytes, [&] { sums[part] = reduce_slices<V>(within, reduction, kNever); });
    views.push_back(sums[part].view());
  }
  bytes = 0;
  for (const auto& view : views) bytes += bytes_of(view);
  co_await decide(net, bytes, [&] { sum = concatenate_slices<V>(views, reduction, delta); });
  co_return sum;
}

struct Outgoing {
  Outgoing(Transport& net, Rank to, Buffer share)
      : encoded(std::move(share)), sending(net, to, kSplit, encoded.bytes()) {}
  Buffer encoded;
  Transport::Sending sending;
};

// The split. Shares leave and come by distance, the next rank's first, at most kWindow of them in each direction under
// way: with thousands of ranks, all at once would take memory that grows with the square of their number.
//
// This cannot deadlock. Take the smallest distance of which a message is not over: all that its sender and its receiver
// wait for before they begin it is of smaller distances, and over.
template <class V>
Task<void> send_shares(Transport& net, const SparseStream<V>& mine, Reduction reduction, double switch_factor) {
  const Rank size = net.size();
  const auto ahead = [&](Rank distance) { return (net.rank() + distance) % size; };
  Window<Outgoing, kWindow> sends;
  std::vector<StreamView<V>> batch;
  std::vector<Buffer> encoded;
  for (Rank distance = 1; distance < size;) {
    batch.clear();
    encoded.clear();
    std::size_t bytes = 0;
    for (Rank next = distance; next < size && batch.size() < kWindow && bytes < kBatchBytes; ++next) {
      const IndexRange range = slice_of(mine.dimension(), size, ahead(next));
      batch.push_back(mine.slice(range.begin, range.end));
      bytes += bytes_of(batch.back());
    }
    co_await decide(net, bytes, [&] {
      for (const auto& share : batch) encoded.push_back(encode_share(share, reduction, switch_factor));
    });
    for (Buffer& share : encoded) {
      if (sends.full()) {
        co_await sends.front().sending;
        sends.pop_front();
      }
      sends.emplace_back(net, ahead(distance++), std::move(share));
    }
  }
  for (; !sends.empty(); sends.pop_front()) co_await sends.front().sending;
}

// From all other ranks, but for those that equal `nothing`: of many ranks most have no entry in most slices.
Task<KeptMessages> receive_shares(Transport& net, std::size_t most_bytes, ConstBytes nothing) {
  const Rank size = net.size();
  const auto behind = [&](Rank distance) { return (net.rank() + size - distance) % size; };
  KeptMessages shares;
  Window<Transport::ReceivingAny, kWindow> receives;
  Rank begun = 1;
  for (Rank distance = 1; distance < size; ++distance) {
    for (; begun < size && !receives.full(); ++begun) {
      receives.emplace_back(net, behind(begun), kSplit, most_bytes);
    }
    Buffer share = co_await receives.front();
    receives.pop_front();
    if (!same_message(share.bytes(), nothing)) shares.add(behind(distance), std::move(share));
  }
  co_return shares;
}

// What this rank owns: the encoded sum of everybody's shares of its slice.
template <class V>
Task<void> sum_owned_slice(Transport& net, const SparseStream<V>& mine, Reduction reduction, double switch_factor,
                           Buffer& encoded) {
  const Rank rank = net.rank();
  const Rank size = net.size();
  const IndexRange owned = slice_of(mine.dimension(), size, rank);
  const Buffer nothing = encode(SparseStream<V>(mine.dimension()).slice(owned.begin, owned.end));
  const KeptMessages shares = co_await receive_shares(net, most_bytes<V>(owned), nothing.bytes());
  std::vector<ConstBytes> incoming = shares.by_source(size, nothing.bytes());
  incoming[rank] = {};
  const auto decode_share = [&](Rank source) {
    if (source == rank) return Decoded<V>(mine.slice(owned.begin, owned.end), {});
    return decode<V>(incoming[source], owned);
  };
  const auto decoded = co_await decode_all<V>(net, incoming, "entries", decode_share);
  OwnedSlice<V> sum =
      co_await reduce_shares<V>(net, views_of<V>(decoded), reduction, wire_delta<V>(owned, switch_factor));
  if (reduction == Reduction::avg) {
    co_await decide(net, sum.view().nnz() * sizeof(V), [&] { scale(sum, 1.0 / size); });
  }
  co_await decide(net, bytes_of(sum.view()), [&] { encoded = encode(sum.view()); });
}

template <class V>
Task<Buffer> reduce_owned_slice(Transport& net, const SparseStream<V>& mine, Reduction reduction,
                                double switch_factor) {
  Buffer encoded;
  std::vector<Task<void>> both;
  both.push_back(send_shares(net, mine, reduction, switch_factor));
  both.push_back(sum_owned_slice(net, mine, reduction, switch_factor, encoded));
  co_await when_all(std::move(both));
  co_return encoded;
}

// The sum of all streams, slice by slice in the order of owners. The slices lie in the messages.
template <class V>
struct Gathered {
  KeptMessages messages;
  std::vector<Decoded<V>> slices;
};

template <class V>
Task<Gathered<V>> gather_sum(Transport& net, SparseStream<V> mine, Reduction reduction, double switch_factor) {
  const Rank size = net.size();
  const std::uint64_t dimension = mine.dimension();
  const std::size_t most = most_bytes<V>(slice_of(dimension, size, 0));  // the first is a longest one
  Buffer owned = co_await reduce_owned_slice(net, mine, reduction, switch_factor);

  Gathered<V> sum;
  sum.messages = co_await allgather_any_size(net, std::move(owned), most, kGather);
  const std::vector<ConstBytes> encoded = sum.messages.by_source(size);
  sum.slices = co_await decode_all<V>(net, encoded, "a sum", [&](Rank owner) {
    return decode<V>(encoded[owner], slice_of(dimension, size, owner));
  });
  co_return sum;
}

}  // namespace

template <class V>
Task<SparseStream<V>> allreduce_split_allgather(Transport& net, SparseStream<V> mine, Reduction reduction,
                                                double switch_factor) {
  const double delta = memory_delta<V>(mine.dimension(), switch_factor);
  const Gathered<V> sum = co_await gather_sum(net, std::move(mine), reduction, switch_factor);
  std::size_t bytes = 0;
  for (const auto& slice : sum.slices) bytes += bytes_of(slice.view());
  SparseStream<V> joined;
  co_await decide(net, bytes, [&] { joined = join_slices<V>(views_of<V>(sum.slices), reduction, delta); });
  co_return joined;
}

template <class V>
Task<void> allreduce_split_allgather_into(Transport& net, SparseStream<V> mine, Reduction reduction,
                                          double switch_factor, std::span<V> output) {
  TELEGRAD_CHECK(output.size() == mine.dimension());
  const Gathered<V> sum = co_await gather_sum(net, std::move(mine), reduction, switch_factor);
  for (const auto& decoded : sum.slices) {
    const StreamView<V>& slice = decoded.view();
    const std::uint64_t first = slice.range.begin;
    co_await compute_slices(net, static_cast<std::size_t>(slice.range.size()), sizeof(V),
                            [&slice, first, output, reduction](std::size_t begin, std::size_t end) {
                              write_dense(slice.slice({first + begin, first + end}),
                                          output.subspan(first + begin, end - begin), reduction);
                            });
  }
}

#define TELEGRAD_INSTANTIATE(V)                                                                                   \
  template Task<SparseStream<V>> allreduce_split_allgather(Transport&, SparseStream<V>, Reduction, double);       \
  template Task<void> allreduce_split_allgather_into(Transport&, SparseStream<V>, Reduction, double, std::span<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE
template Task<SparseStream<CountedF32>> allreduce_split_allgather(Transport&, SparseStream<CountedF32>, Reduction,
                                                                  double);

}  // namespace telegrad
