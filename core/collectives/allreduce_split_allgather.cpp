// Sparse allreduce by split and allgather: 2(P−1)α + (k + K)(P−1)/P·β for evenly spread entries. Renggli et al.,
// "SparCML: high-performance sparse communication for machine learning", SC 2019, §5.3.2 (SSAR_Split_allgather), and
// §5.3.3 for slices that go dense.
//
// Each rank owns one slice of the index range, adds up everybody's entries there, and encodes the sum once; the encoded
// slices go round a ring, and everybody, the owner too, decodes the same bytes, while the next slice comes.
#include "collectives/allreduce_split_allgather.hpp"

#include <optional>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "collectives/allgather_any_size.hpp"
#include "collectives/elements.hpp"
#include "collectives/sparse_messages.hpp"
#include "collectives/sparse_split.hpp"

namespace telegrad {
namespace {

// The slices of the sum, by owner. They lie in the messages.
template <class V>
struct Gathered {
  explicit Gathered(Rank size) : slices(size) {}
  KeptMessages messages;
  std::vector<std::optional<Decoded<V>>> slices;
};

// `written(slice)` is awaited for each slice that has come and is right, while others come.
template <class V, class Written>
Task<void> gather_sum(Transport& net, SparseStream<V> mine, Reduction reduction, double switch_factor,
                      Gathered<V>& gathered, Written written) {
  const Rank size = net.size();
  const std::uint64_t dimension = mine.dimension();
  Buffer encoded;
  {
    const OwnedSlice<V> owned = co_await reduce_owned_slice(net, mine, reduction, switch_factor);
    co_await decide(net, bytes_of(owned.view()), [&] { encoded = encode(owned.view()); });
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
      co_await check_decoded(net, owner, *gathered.slices[owner]);
      co_await written(gathered.slices[owner]->view());
    }
  };
  const std::size_t most = most_bytes<V>(slice_of(dimension, size, 0));  // the first is a longest one
  gathered.messages =
      co_await allgather_any_size(net, std::move(encoded), most, split_steps<V>(net, dimension), take);
}

}  // namespace

template <class V>
Task<SparseStream<V>> allreduce_split_allgather(Transport& net, SparseStream<V> mine, Reduction reduction,
                                                double switch_factor) {
  const double delta = memory_delta<V>(mine.dimension(), switch_factor);
  Gathered<V> gathered(net.size());
  const auto nothing = [](const StreamView<V>&) -> Task<void> { co_return; };
  co_await gather_sum(net, std::move(mine), reduction, switch_factor, gathered, nothing);
  std::vector<StreamView<V>> slices;
  std::size_t bytes = 0;
  for (const auto& slice : gathered.slices) {
    slices.push_back(slice->view());
    bytes += bytes_of(slices.back());
  }
  SparseStream<V> joined;
  co_await decide(net, bytes, [&] { joined = join_slices<V>(slices, reduction, delta); });
  co_return joined;
}

template <class V>
Task<void> allreduce_split_allgather_into(Transport& net, SparseStream<V> mine, Reduction reduction,
                                          double switch_factor, std::span<V> output) {
  TELEGRAD_CHECK(output.size() == mine.dimension());
  Gathered<V> gathered(net.size());
  const auto write = [&net, output, reduction](const StreamView<V>& slice) -> Task<void> {
    const std::uint64_t first = slice.range.begin;
    co_await compute_slices(net, static_cast<std::size_t>(slice.range.size()), sizeof(V),
                            [&slice, first, output, reduction](std::size_t begin, std::size_t end) {
                              write_dense(slice.slice({first + begin, first + end}),
                                          output.subspan(first + begin, end - begin), reduction);
                            });
  };
  co_await gather_sum(net, std::move(mine), reduction, switch_factor, gathered, write);
}

#define TELEGRAD_INSTANTIATE(V)                                                                             \
  template Task<SparseStream<V>> allreduce_split_allgather(Transport&, SparseStream<V>, Reduction, double); \
  template Task<void> allreduce_split_allgather_into(Transport&, SparseStream<V>, Reduction, double, std::span<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE
template Task<SparseStream<CountedF32>> allreduce_split_allgather(Transport&, SparseStream<CountedF32>, Reduction,
                                                                  double);

}  // namespace telegrad
