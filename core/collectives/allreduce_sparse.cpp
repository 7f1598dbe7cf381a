// Sparse allreduce over owned slices: each rank owns one slice of the index range, comes to the sum of everybody's entries
// there, and encodes it once; the encoded slices go round a ring, and everybody, the owner too, decodes the same bytes,
// while the next slice comes. For evenly spread entries 2(P−1)α + (k + K)(P−1)/P·β with the split. Renggli et al.,
// "SparCML: high-performance sparse communication for machine learning", SC 2019, §5.3.2 (SSAR_Split_allgather) and
// §5.3.3 (DSAR_Split_allgather: owned slices go dense).
#include "collectives/allreduce_sparse.hpp"

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "collectives/allgather_any_size.hpp"
#include "collectives/elements.hpp"
#include "collectives/allreduce_sparse_doubling.hpp"
#include "collectives/sparse_messages.hpp"
#include "collectives/sparse_ring.hpp"
#include "collectives/sparse_split.hpp"

namespace telegrad {
namespace {

// Of more ranks' slices, what is known of each before all have come would take memory that grows with the square of their
// number.
constexpr Rank kTakenAsTheyCome = 256;

// The slices of the sum, by owner. They lie in the messages.
template <class V>
struct Gathered {
  explicit Gathered(Rank size) : slices(size <= kTakenAsTheyCome ? size : 0) {}
  KeptMessages messages;
  std::vector<std::optional<Decoded<V>>> slices;
};

// `written(slice)`, if any, is awaited for each slice that has come and is right, while others come.
template <class V>
Task<void> gather_sum(Transport& net, SparseStream<V> mine, const SparseReduction& how, Gathered<V>& gathered,
                      std::function<Task<void>(const StreamView<V>&)> written = nullptr) {
  const Rank size = net.size();
  const std::uint64_t dimension = mine.dimension();
  const bool by_ring = how.algorithm == Algorithm::ring && size > 1;
  // Of a mean, an error counts as often as there are ranks that it is the mean of.
  const float weight = how.reduction == Reduction::avg ? static_cast<float>(size) : 1.0F;
  Buffer encoded;
  {
    OwnedSlice<V> owned;
    if (by_ring) {  // GCC 12 does not understand co_await in a conditional expression
      owned = co_await ring_owned_slice(net, mine, how);
    } else {
      owned = co_await reduce_owned_slice(net, mine, how);
    }
    if (how.algorithm == Algorithm::split_dense_allgather && !owned.dense) {
      const auto bytes = static_cast<std::size_t>(owned.range.size()) * sizeof(V);
      co_await decide(net, bytes, [&] { owned = dense_slice(owned.view(), how.reduction); });
    }
    co_await decide(net, bytes_of(owned.view()), [&] { encoded = encode_keeping_error(owned.view(), how, weight); });
  }
  const auto take = [&](std::span<const Arrived> batch) -> Task<void> {
    std::size_t bytes = 0;
    for (const Arrived& one : batch) bytes += one.bytes.size();
    co_await decide(net, bytes, [&] {
      for (const auto& [owner, message] : batch) {
        gathered.slices[owner].emplace(decode<V>(message, slice_of(dimension, size, owner)));
      }
    });
    for (const auto& [owner, message] : batch) {
      const Decoded<V>& slice = *gathered.slices[owner];
      // It has gone through other hands.
      if (!slice.ok()) co_await check_decoded(net, owner, slice, "sums");
      if (written) co_await written(slice.view());
    }
  };
  const std::size_t most = most_bytes<V>(slice_of(dimension, size, 0));  // the first is a longest one
  const Step first_step = by_ring ? ring_steps<V>(net, dimension) : split_steps<V>(net, dimension);
  if (size <= kTakenAsTheyCome) {
    gathered.messages = co_await allgather_any_size(net, std::move(encoded), most, first_step, take);
    co_return;
  }
  gathered.messages = co_await allgather_any_size(net, std::move(encoded), most, first_step, nullptr);
  const std::vector<ConstBytes> messages = gathered.messages.by_source(size);
  gathered.slices.resize(size);
  for (Rank owner = 0; owner < size;) {
    std::vector<Arrived> batch;
    for (std::size_t bytes = 0; owner < size && bytes < Transport::kTurnBytes; ++owner) {
      batch.push_back({owner, messages[owner]});
      bytes += messages[owner].size();
    }
    co_await take(batch);
  }
}

}  // namespace

template <class V>
Task<SparseStream<V>> allreduce_sparse(Transport& net, SparseStream<V> mine, SparseReduction how) {
  const double delta = memory_delta<V>(mine.dimension(), how.switch_factor);
  if (how.algorithm == Algorithm::recursive_doubling) {
    const OwnedSlice<V> sum = co_await allreduce_sparse_doubling(net, std::move(mine), how);
    const std::vector<StreamView<V>> whole{sum.view()};
    SparseStream<V> stream;
    co_await decide(net, bytes_of(whole[0]), [&] { stream = join_slices<V>(whole, how.reduction, delta); });
    co_return stream;
  }
  Gathered<V> gathered(net.size());
  co_await gather_sum(net, std::move(mine), how, gathered);
  std::vector<StreamView<V>> slices;
  std::size_t bytes = 0;
  for (const auto& slice : gathered.slices) {
    slices.push_back(slice->view());
    bytes += bytes_of(slices.back());
  }
  SparseStream<V> joined;
  co_await decide(net, bytes, [&] { joined = join_slices<V>(slices, how.reduction, delta); });
  co_return joined;
}

template <class V>
Task<void> allreduce_sparse_into(Transport& net, SparseStream<V> mine, SparseReduction how, std::span<V> output) {
  TELEGRAD_CHECK(output.size() == mine.dimension());
  const auto write = [&net, output, reduction = how.reduction](const StreamView<V>& slice) -> Task<void> {
    const std::uint64_t first = slice.range.begin;
    co_await compute_slices(net, static_cast<std::size_t>(slice.range.size()), sizeof(V),
                            [&slice, first, output, reduction](std::size_t begin, std::size_t end) {
                              write_dense(slice.slice({first + begin, first + end}),
                                          output.subspan(first + begin, end - begin), reduction);
                            });
  };
  if (how.algorithm == Algorithm::recursive_doubling) {
    const OwnedSlice<V> sum = co_await allreduce_sparse_doubling(net, std::move(mine), how);
    const StreamView<V> whole = sum.view();
    co_await write(whole);
    co_return;
  }
  Gathered<V> gathered(net.size());
  co_await gather_sum<V>(net, std::move(mine), how, gathered, write);
}

#define TELEGRAD_INSTANTIATE(V)                                                                    \
  template Task<SparseStream<V>> allreduce_sparse(Transport&, SparseStream<V>, SparseReduction); \
  template Task<void> allreduce_sparse_into(Transport&, SparseStream<V>, SparseReduction, std::span<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE
template Task<SparseStream<CountedF32>> allreduce_sparse(Transport&, SparseStream<CountedF32>, SparseReduction);

}  // namespace telegrad
