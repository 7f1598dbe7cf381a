// Sparse allreduce over owned slices: each rank owns one slice of the index range, comes to the sum of everybody's entries
// there, and encodes it once; the encoded slices go round a ring, and everybody, the owner too, decodes the same bytes,
// while the next slice comes. For evenly spread entries 2(P−1)α + (k + K)(P−1)/P·β with the split. Renggli et al.,
// "SparCML: high-performance sparse communication for machine learning", SC 2019, §5.3.2 (SSAR_Split_allgather) and
// §5.3.3 (DSAR_Split_allgather: owned slices go dense).
#include "collectives/allreduce_sparse.hpp"

#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "collectives/allgather_any_size.hpp"
#include "collectives/allreduce_sparse_doubling.hpp"
#include "collectives/any_size.hpp"
#include "collectives/balanced_slices.hpp"
#include "collectives/counts.hpp"
#include "collectives/elements.hpp"
#include "collectives/sparse_messages.hpp"
#include "collectives/sparse_ring.hpp"
#include "collectives/sparse_split.hpp"
#include "sparse/assembly.hpp"

namespace telegrad {
namespace {

// Who holds how much is news worth messages of its own where slices are long, and few. The same whatever a rank wants the
// sum as: their messages are alike.
template <class V>
bool counts_go_ahead(const Transport& net, const Partition& slices) {
  return net.size() <= 64 && most_bytes<V>(slices) >= 4 * Transport::kSliceBytes;
}
constexpr std::uint64_t kDense = ~std::uint64_t{0};

// A rank's slice of the sum, as it is sent; all ranks' slices; and where the messages with which they go round begin.
struct Owned {
  Partition slices;
  Buffer encoded{};
  std::uint64_t count = 0;  // of entries, or kDense
  std::size_t most_bytes = 0;
  Step first_step = 0;
};

template <class V>
Task<Owned> reduce_owned(Transport& net, SparseStream<V> mine, SparseReduction how) {
  const Rank size = net.size();
  const bool by_ring = how.algorithm == Algorithm::ring && size > 1;
  // Of a mean, an error counts as often as there are ranks that it is the mean of.
  const float weight = how.reduction == Reduction::avg ? static_cast<float>(size) : 1.0F;
  Owned result{.slices = Partition(static_cast<std::size_t>(mine.dimension()), size)};
  if (how.slices == Slices::balanced && size > 1) {
    result.slices = co_await balanced_slices(net, mine);
    how.switch_factor = std::numeric_limits<double>::infinity();
  }
  const Partition& slices = result.slices;
  result.most_bytes = most_bytes<V>(slices);
  result.first_step = by_ring ? ring_steps<V>(net, slices) : split_steps<V>(net, slices);
  OwnedSlice<V> owned;
  if (by_ring) {  // GCC 12 does not understand co_await in a conditional expression
    owned = co_await ring_owned_slice(net, mine, slices, how);
  } else {
    owned = co_await reduce_owned_slice(net, mine, slices, how);
  }
  mine = SparseStream<V>();  // long streams leave room for the sum
  if (how.algorithm == Algorithm::split_dense_allgather && !owned.dense) {
    const auto bytes = static_cast<std::size_t>(owned.range.size()) * sizeof(V);
    co_await decide(net, bytes, [&] { owned = dense_slice(owned.view(), how.reduction); });
  }
  result.count = owned.dense ? kDense : owned.view().nnz();
  co_await decide(net, bytes_of(owned.view()), [&] { result.encoded = encode_keeping_error(owned.view(), how, weight); });
  co_return result;
}

// The stream of everybody's slices, each of which is decoded to its place: once it is known how many entries those before
// it have.
template <class V>
class Assembling {
 public:
  Assembling(Transport& net, Partition slices, const SparseReduction& how)
      : net_(net), slices_(std::move(slices)), how_(how) {}

  Task<void> begin(const std::vector<std::uint64_t>& counts) {
    std::vector<SliceContent> slices;
    for (Rank owner = 0; owner < net_.size(); ++owner) {
      const IndexRange range = slice_of(slices_, owner);
      const bool dense = counts[owner] == kDense;
      const std::uint64_t nnz = dense ? range.size() : counts[owner];
      if (nnz > range.size()) {
        co_await fail(owner, "it says that " + std::to_string(nnz) + " of " + std::to_string(range.size()) +
                                 " elements have an entry");
      }
      slices.push_back({range, dense, nnz});
    }
    whole_.emplace(std::move(slices), how_.reduction, memory_delta<V>(slices_.count(), how_.switch_factor));
  }
  bool begun() const { return whole_.has_value(); }

  Task<void> place(std::span<const Arrived> batch) {
    std::size_t bytes = 0;
    for (const Arrived& one : batch) bytes += one.bytes.size();
    Rank source = 0;
    std::string error;
    co_await decide(net_, bytes, [&] {
      for (std::size_t i = 0; i < batch.size() && error.empty(); ++i) {
        source = batch[i].source;
        error = whole_->place(source, batch[i].bytes);
      }
    });
    if (!error.empty()) co_await fail(source, error);
  }
  SparseStream<V> finish() { return whole_->finish(); }

 private:
  // A slice has gone through other hands.
  Transport::Failing fail(Rank owner, const std::string& error) { return fail_damaged(net_, owner, "sums", error); }

  Transport& net_;
  const Partition slices_;
  const SparseReduction& how_;
  std::optional<StreamAssembly<V>> whole_;
};

Step step_of_counts(const Transport& net, const Owned& owned) {
  return owned.first_step + (net.size() - 1) * any_size_steps(net, owned.most_bytes);
}

template <class V>
Task<void> assemble_as_they_come(Transport& net, Owned owned, Assembling<V>& whole) {
  Counts counts(net, step_of_counts(net, owned), owned.count);
  Taking taking;
  taking.ready = [&counts] { return counts.all_known(); };
  taking.take = [&](std::span<const Arrived> batch) -> Task<void> {
    if (!whole.begun()) {
      const std::vector<std::uint64_t> held = co_await counts.wait();
      co_await whole.begin(held);
    }
    co_await whole.place(batch);
  };
  co_await allgather_any_size(net, std::move(owned.encoded), owned.most_bytes, owned.first_step, taking);
  co_await counts.finish();
}

template <class V>
Task<void> assemble_at_the_end(Transport& net, Owned owned, Assembling<V>& whole) {
  const Rank size = net.size();
  const Taking nothing;
  const KeptMessages kept =
      co_await allgather_any_size(net, std::move(owned.encoded), owned.most_bytes, owned.first_step, nothing);
  const std::vector<ConstBytes> messages = kept.by_source(size);
  std::vector<std::uint64_t> counts;
  for (Rank owner = 0; owner < size; ++owner) {
    const StreamHeader header = claimed_header(messages[owner]);
    counts.push_back(header.kind == StreamKind::dense ? kDense : header.nnz);
  }
  co_await whole.begin(counts);
  for (Rank owner = 0; owner < size;) {
    std::vector<Arrived> batch;
    for (std::size_t bytes = 0; owner < size && bytes < Transport::kTurnBytes; ++owner) {
      batch.push_back({owner, messages[owner]});
      bytes += messages[owner].size();
    }
    co_await whole.place(batch);
  }
}

}  // namespace

template <class V>
Task<SparseStream<V>> allreduce_sparse(Transport& net, SparseStream<V> mine, SparseReduction how) {
  if (how.algorithm == Algorithm::recursive_doubling) {
    const double delta = memory_delta<V>(mine.dimension(), how.switch_factor);
    const OwnedSlice<V> sum = co_await allreduce_sparse_doubling(net, std::move(mine), how);
    const std::vector<StreamView<V>> whole{sum.view()};
    SparseStream<V> stream;
    co_await decide(net, bytes_of(whole[0]), [&] { stream = join_slices<V>(whole, how.reduction, delta); });
    co_return stream;
  }
  Owned owned = co_await reduce_owned(net, std::move(mine), how);
  Assembling<V> whole(net, owned.slices, how);
  if (counts_go_ahead<V>(net, owned.slices)) {
    co_await assemble_as_they_come(net, std::move(owned), whole);
  } else {
    co_await assemble_at_the_end(net, std::move(owned), whole);
  }
  co_return whole.finish();
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
  Owned owned = co_await reduce_owned(net, std::move(mine), how);
  std::optional<Counts> counts;
  if (counts_go_ahead<V>(net, owned.slices)) counts.emplace(net, step_of_counts(net, owned), owned.count);
  Taking taking;
  taking.take = [&](std::span<const Arrived> batch) -> Task<void> {
    for (const auto& [owner, message] : batch) {
      std::optional<Decoded<V>> slice;
      co_await decide(net, message.size(), [&] { slice.emplace(decode<V>(message, slice_of(owned.slices, owner))); });
      co_await check_decoded(net, owner, *slice, "sums");
      co_await write(slice->view());
    }
  };
  co_await allgather_any_size(net, std::move(owned.encoded), owned.most_bytes, owned.first_step, taking);
  if (counts) co_await counts->finish();
}

#define TELEGRAD_INSTANTIATE(V)                                                                    \
  template Task<SparseStream<V>> allreduce_sparse(Transport&, SparseStream<V>, SparseReduction); \
  template Task<void> allreduce_sparse_into(Transport&, SparseStream<V>, SparseReduction, std::span<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE
template Task<SparseStream<CountedF32>> allreduce_sparse(Transport&, SparseStream<CountedF32>, SparseReduction);

}  // namespace telegrad
