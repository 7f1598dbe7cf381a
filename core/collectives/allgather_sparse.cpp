// Concatenating allgather of sparse streams round a ring: (P−1)(α + k·β) with k entries per rank; messages are decoded
// while others come. Renggli et al., "SparCML: high-performance sparse communication for machine learning", SC 2019,
// §5.2: where every rank needs the others' entries, and not their sum.
#include "collectives/allgather_sparse.hpp"

#include <limits>
#include <utility>

#include "collectives/allgather_any_size.hpp"
#include "sparse/slices.hpp"

namespace telegrad {

template <class V>
Task<std::vector<SparseStream<V>>> allgather_sparse(Transport& net, SparseStream<V> mine, SparseReduction how) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const IndexRange whole{0, mine.dimension()};
  Buffer encoded;
  {
    const SparseStream<V> sent = std::move(mine);
    co_await decide(net, bytes_of(sent.view()), [&] { encoded = encode_keeping_error(sent.view(), how); });
  }
  std::vector<SparseStream<V>> streams(net.size());
  const auto take = [&](std::span<const Arrived> batch) -> Task<void> {
    for (const auto& [source, message] : batch) {
      const Decoded<V> decoded = decode<V>(message, whole);
      if (!decoded.ok()) co_await check_decoded(net, source, decoded, "streams");  // it has gone through other hands
      const std::vector<StreamView<V>> alone{decoded.view()};
      SparseStream<V>& stream = streams[source];
      co_await decide(net, message.size(), [&] { stream = join_slices<V>(alone, Reduction::none, kNever); });
    }
  };
  co_await allgather_any_size(net, std::move(encoded), most_bytes<V>(whole), 0, take);
  co_return streams;
}

#define TELEGRAD_INSTANTIATE(V) \
  template Task<std::vector<SparseStream<V>>> allgather_sparse(Transport&, SparseStream<V>, SparseReduction);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
