// Concatenating allgather of sparse vectors: ⌈log2 P⌉·α + (P−1)k·β with k entries per rank where they are few; where they
// are many, then round a ring, (P−1)(α + k·β) more, and messages are decoded while others come. Renggli et al., "SparCML:
// high-performance sparse communication for machine learning", SC 2019, §5.2: where every rank needs the others' entries,
// and not their sum.
#include "collectives/sparse/allgather.hpp"

#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "codec/assembly.hpp"
#include "codec/wire.hpp"
#include "collectives/support/allgather_any_size.hpp"
#include "collectives/support/allgather_short.hpp"

namespace telegrad {
namespace {

// Leaves `vector` what the message says; returns what is wrong with it, or nothing.
template <class V>
std::string read_vector(ConstBytes message, IndexRange range, SparseVector<V>& vector) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  VectorHeader header;
  if (std::string error = read_header(message, dtype_of<V>, range, header); !error.empty()) return error;
  const bool dense = header.kind == VectorKind::dense;
  VectorAssembly<V> whole({{range, dense, dense ? range.size() : header.nnz}}, Reduction::none, kNever);
  std::string error = whole.place(0, message);
  if (error.empty()) vector = whole.finish();
  return error;
}

}  // namespace

template <class V>
Task<std::vector<SparseVector<V>>> allgather_sparse(Transport& net, SparseVector<V> mine, SparseReduction how) {
  const IndexRange whole{0, mine.dimension()};
  Buffer encoded;
  {
    const SparseVector<V> sent = std::move(mine);
    co_await decide(net, bytes_of(sent.view()), [&] { encoded = encode_keeping_error(sent.view(), how); });
  }
  std::vector<SparseVector<V>> vectors(net.size());
  const auto take = [&](std::span<const Arrived> batch) -> Task<void> {
    for (const auto& [source, message] : batch) {
      std::string error;
      co_await decide(net, message.size(), [&] { error = read_vector(message, whole, vectors[source]); });
      if (!error.empty()) co_await fail_damaged(net, source, "sparse vectors", error);  // it has gone through other hands
    }
  };
  Taking taking;
  Step first_step = 0;
  ShortMessages known;
  if constexpr (std::is_same_v<V, CountedF32>) {  // whose messages have lengths, but nothing that could be packed
    taking.take = take;
  } else {
    known = co_await allgather_short(net, encoded.bytes(), "sparse vectors");
    std::vector<Arrived> there;
    for (Rank source = 0; source < net.size(); ++source) {
      if (!known.by_rank[source].empty()) there.push_back({source, known.by_rank[source]});
    }
    co_await take(there);
    if (there.size() == net.size()) co_return vectors;
    first_step = short_message_steps(net);
    if (encoded.size() <= kShortMessageBytes) encoded = {};
    taking.take = [&](std::span<const Arrived> batch) -> Task<void> {
      std::vector<Arrived> longer;
      for (const Arrived& one : batch) {
        if (known.by_rank[one.source].empty()) longer.push_back(one);
      }
      co_await take(longer);
    };
  }
  co_await allgather_any_size(net, std::move(encoded), most_bytes<V>(whole), first_step, taking);
  co_return vectors;
}

#define TELEGRAD_INSTANTIATE(V) \
  template Task<std::vector<SparseVector<V>>> allgather_sparse(Transport&, SparseVector<V>, SparseReduction);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
