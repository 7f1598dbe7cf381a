// Concatenating allgather of sparse streams round a ring: (P−1)(α + k·β) with k entries per rank; messages are decoded
// while others come. Renggli et al., "SparCML: high-performance sparse communication for machine learning", SC 2019,
// §5.2: where every rank needs the others' entries, and not their sum.
#include "collectives/allgather_sparse.hpp"

#include <limits>
#include <string>
#include <utility>

#include "collectives/allgather_any_size.hpp"
#include "sparse/assembly.hpp"
#include "sparse/wire.hpp"

namespace telegrad {
namespace {

// Leaves `stream` what the message says; returns what is wrong with it, or nothing.
template <class V>
std::string read_stream(ConstBytes message, IndexRange range, SparseStream<V>& stream) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  StreamHeader header;
  if (std::string error = read_header(message, dtype_of<V>, range, header); !error.empty()) return error;
  const bool dense = header.kind == StreamKind::dense;
  StreamAssembly<V> whole({{range, dense, dense ? range.size() : header.nnz}}, Reduction::none, kNever);
  std::string error = whole.place(0, message);
  if (error.empty()) stream = whole.finish();
  return error;
}

}  // namespace

template <class V>
Task<std::vector<SparseStream<V>>> allgather_sparse(Transport& net, SparseStream<V> mine, SparseReduction how) {
  const IndexRange whole{0, mine.dimension()};
  Buffer encoded;
  {
    const SparseStream<V> sent = std::move(mine);
    co_await decide(net, bytes_of(sent.view()), [&] { encoded = encode_keeping_error(sent.view(), how); });
  }
  std::vector<SparseStream<V>> streams(net.size());
  Taking taking;
  taking.take = [&](std::span<const Arrived> batch) -> Task<void> {
    for (const auto& [source, message] : batch) {
      std::string error;
      co_await decide(net, message.size(), [&] { error = read_stream(message, whole, streams[source]); });
      if (!error.empty()) co_await fail_damaged(net, source, "streams", error);  // it has gone through other hands
    }
  };
  co_await allgather_any_size(net, std::move(encoded), most_bytes<V>(whole), 0, taking);
  co_return streams;
}

#define TELEGRAD_INSTANTIATE(V) \
  template Task<std::vector<SparseStream<V>>> allgather_sparse(Transport&, SparseStream<V>, SparseReduction);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
