// Sparse allreduce by split and allgather: 2(P−1)α + (k + K)(P−1)/P·β for evenly spread entries. Renggli et al.,
// "SparCML: high-performance sparse communication for machine learning", SC 2019, §5.3.2 (SSAR_Split_allgather), and
// §5.3.3 for slices that go dense.
//
// Each rank owns one slice of the index range. Every rank sends every owner its entries of that slice, the next rank
// first, so that no owner is everybody's first. The owner adds them in the order of ranks and encodes the sum once; the
// encoded slices go round a ring, and everybody, the owner too, decodes the same bytes.
#include "collectives/allreduce_split_allgather.hpp"

#include <cmath>
#include <deque>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "collectives/allgather.hpp"
#include "collectives/blocks.hpp"
#include "kernels/reduce.hpp"
#include "sparse/slices.hpp"
#include "sparse/wire.hpp"

namespace telegrad {
namespace {

constexpr Step kSplit = 0;
constexpr Step kGather = 1;
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
std::size_t bytes_of(const StreamView<V>& view) {
  return view.indices.size_bytes() + view.values.size_bytes();
}

template <class V>
Buffer encode_share(const StreamView<V>& share, double switch_factor) {
  const bool stays = share.dense || static_cast<double>(share.nnz()) <= wire_delta<V>(share.range, switch_factor);
  if (stays) return encode(share);
  const Array<V> values(static_cast<std::size_t>(share.range.size()));
  write_dense(share, values.span());
  return encode(StreamView<V>{share.range, true, {}, values.span()});
}

// The sum of the ranks' shares of one range, in the order of ranks; in parts of the range, between which the network
// has its turn.
template <class V>
Task<OwnedSlice<V>> reduce(Transport& net, std::vector<StreamView<V>> shares, double delta) {
  std::size_t bytes = 0;
  for (const auto& share : shares) bytes += bytes_of(share);
  const Range whole{static_cast<std::size_t>(shares[0].range.begin), static_cast<std::size_t>(shares[0].range.end)};
  const std::size_t parts = bytes / Transport::kSliceBytes + 1;

  OwnedSlice<V> sum;
  if (parts == 1) {
    co_await net.compute(bytes, [&] { sum = reduce_slices<V>(shares, delta); });
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
    co_await net.compute(bytes, [&] { sums[part] = reduce_slices<V>(within, kNever); });
    views.push_back(sums[part].view());
  }
  bytes = 0;
  for (const auto& view : views) bytes += bytes_of(view);
  co_await net.compute(bytes, [&] { sum = concatenate_slices<V>(views, delta); });
  co_return sum;
}

template <class V>
void scale_values(OwnedSlice<V>& slice, float factor) {
  kernels::scale(dtype_of<V>, std::as_writable_bytes(slice.values.span()), factor);
}

// Split: sends everybody's share, receives everybody's share of the owned slice; the encoded sum of that slice.
template <class V>
Task<Buffer> reduce_owned_slice(Transport& net, const SparseStream<V>& mine, Reduction reduction,
                                double switch_factor) {
  const Rank rank = net.rank();
  const Rank size = net.size();
  const auto share_of = [&](Rank owner) {
    const IndexRange range = slice_of(mine.dimension(), size, owner);
    return mine.slice(range.begin, range.end);
  };
  const IndexRange owned = slice_of(mine.dimension(), size, rank);

  std::vector<Buffer> outgoing(size);
  for (Rank owner = 0; owner < size; ++owner) {
    if (owner == rank) continue;
    const StreamView<V> share = share_of(owner);
    co_await net.compute(bytes_of(share), [&] { outgoing[owner] = encode_share(share, switch_factor); });
  }
  std::deque<Transport::Sending> sends;
  std::deque<Transport::ReceivingAny> receives;
  for (Rank distance = 1; distance < size; ++distance) {
    const Rank to = (rank + distance) % size;
    const Rank from = (rank + size - distance) % size;
    receives.emplace_back(net, from, kSplit, most_bytes<V>(owned));
    sends.emplace_back(net, to, kSplit, outgoing[to].bytes());
  }

  std::vector<Buffer> incoming(size);
  for (Rank distance = 1; distance < size; ++distance) {
    incoming[(rank + size - distance) % size] = co_await receives[distance - 1];
  }
  std::deque<Decoded<V>> decoded;
  std::vector<StreamView<V>> shares;
  for (Rank source = 0; source < size; ++source) {
    if (source == rank) {
      shares.push_back(share_of(rank));
      continue;
    }
    co_await net.compute(incoming[source].size(),
                         [&] { decoded.push_back(decode<V>(incoming[source].bytes(), owned)); });
    if (!decoded.back().ok()) {
      co_await net.fail(source, "rank " + std::to_string(source) + " sent damaged entries: " + decoded.back().error());
    }
    shares.push_back(decoded.back().view());
  }
  OwnedSlice<V> sum = co_await reduce<V>(net, std::move(shares), wire_delta<V>(owned, switch_factor));
  if (reduction == Reduction::avg) {
    const float factor = 1.0F / static_cast<float>(size);
    co_await net.compute(sum.values.size() * sizeof(V), [&] { scale_values(sum, factor); });
  }
  Buffer encoded;
  co_await net.compute(bytes_of(sum.view()), [&] { encoded = encode(sum.view()); });
  for (auto& sending : sends) co_await sending;
  co_return encoded;
}

// The sum of all streams, slice by slice in the order of owners. The slices lie in the messages.
template <class V>
struct Gathered {
  std::vector<Buffer> messages;
  std::vector<Decoded<V>> decoded;
  std::vector<StreamView<V>> slices;
};

template <class V>
Task<Gathered<V>> gather_sum(Transport& net, SparseStream<V> mine, Reduction reduction, double switch_factor) {
  const Rank size = net.size();
  const std::size_t most = most_bytes<V>(slice_of(mine.dimension(), size, 0));  // the first is a longest one
  Buffer owned = co_await reduce_owned_slice(net, mine, reduction, switch_factor);

  Gathered<V> sum;
  sum.messages = co_await allgather_any_size(net, std::move(owned), most, kGather);
  for (Rank owner = 0; owner < size; ++owner) {
    const IndexRange range = slice_of(mine.dimension(), size, owner);
    co_await net.compute(sum.messages[owner].size(),
                         [&] { sum.decoded.push_back(decode<V>(sum.messages[owner].bytes(), range)); });
    if (!sum.decoded[owner].ok()) {
      co_await net.fail(owner, "rank " + std::to_string(owner) + " sent a damaged sum: " + sum.decoded[owner].error());
    }
    sum.slices.push_back(sum.decoded[owner].view());
  }
  co_return sum;
}

}  // namespace

template <class V>
Task<SparseStream<V>> allreduce_split_allgather(Transport& net, SparseStream<V> mine, Reduction reduction,
                                                double switch_factor) {
  const double delta = memory_delta<V>(mine.dimension(), switch_factor);
  const Gathered<V> sum = co_await gather_sum(net, std::move(mine), reduction, switch_factor);
  std::size_t bytes = 0;
  for (const auto& slice : sum.slices) bytes += bytes_of(slice);
  SparseStream<V> joined;
  co_await net.compute(bytes, [&] { joined = join_slices<V>(sum.slices, delta); });
  co_return joined;
}

template <class V>
Task<void> allreduce_split_allgather_into(Transport& net, SparseStream<V> mine, Reduction reduction,
                                          double switch_factor, std::span<V> output) {
  TELEGRAD_CHECK(output.size() == mine.dimension());
  const Gathered<V> sum = co_await gather_sum(net, std::move(mine), reduction, switch_factor);
  for (const StreamView<V>& slice : sum.slices) {
    const std::uint64_t first = slice.range.begin;
    co_await compute_slices(net, static_cast<std::size_t>(slice.range.size()), sizeof(V),
                            [&slice, first, output](std::size_t begin, std::size_t end) {
                              write_dense(slice.slice({first + begin, first + end}),
                                          output.subspan(first + begin, end - begin));
                            });
  }
}

template Task<SparseStream<float>> allreduce_split_allgather(Transport&, SparseStream<float>, Reduction, double);
template Task<SparseStream<bf16>> allreduce_split_allgather(Transport&, SparseStream<bf16>, Reduction, double);
template Task<void> allreduce_split_allgather_into(Transport&, SparseStream<float>, Reduction, double,
                                                   std::span<float>);
template Task<void> allreduce_split_allgather_into(Transport&, SparseStream<bf16>, Reduction, double, std::span<bf16>);

}  // namespace telegrad
