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
#include "collectives/sparse_open.hpp"
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

// Whether an owner is to make its slice dense. Where the choice is open, that is where it is shorter in the format of this
// message, not in a usual one.
template <class V>
bool sends_densely(const StreamView<V>& owned, const SparseReduction& how) {
  if (how.algorithm == Algorithm::split_dense_allgather) return true;
  if (how.algorithm != Algorithm::automatic || how.wire.values != ValueEncoding::native) return false;
  const double dense_bytes = how.switch_factor * static_cast<double>(owned.range.size() * sizeof(V));
  const auto longest = static_cast<double>(owned.nnz() * (sizeof(std::uint32_t) + sizeof(V)));
  return longest > dense_bytes && static_cast<double>(encoded_size(owned, how.wire)) > dense_bytes + sizeof(StreamHeader);
}

template <class V>
Task<Owned> reduce_owned(Transport& net, SparseStream<V> mine, SparseReduction how) {
  const Rank size = net.size();
  // Between two both send the same, and the ring does it with less work.
  const bool by_ring =
      size > 1 && (how.algorithm == Algorithm::ring || (how.algorithm == Algorithm::automatic && size == 2));
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
  if (!owned.dense && sends_densely(owned.view(), how)) {
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

template <class V>
Task<void> sum_by_slices(Transport& net, SparseStream<V> mine, const SparseReduction& how, SparseStream<V>& sum) {
  Owned owned = co_await reduce_owned(net, std::move(mine), how);
  Assembling<V> whole(net, owned.slices, how);
  if (counts_go_ahead<V>(net, owned.slices)) {
    co_await assemble_as_they_come(net, std::move(owned), whole);
  } else {
    co_await assemble_at_the_end(net, std::move(owned), whole);
  }
  sum = whole.finish();
}

// `entries`: becomes about how many the sum has.
template <class V>
Task<void> sum_by_slices_into(Transport& net, SparseStream<V> mine, const SparseReduction& how, std::span<V> output,
                              double& entries) {
  Owned owned = co_await reduce_owned(net, std::move(mine), how);
  std::optional<Counts> counts;
  if (counts_go_ahead<V>(net, owned.slices)) counts.emplace(net, step_of_counts(net, owned), owned.count);
  Taking taking;
  taking.take = [&](std::span<const Arrived> batch) -> Task<void> {
    for (const auto& [owner, message] : batch) {
      std::optional<Decoded<V>> slice;
      co_await decide(net, message.size(), [&] { slice.emplace(decode<V>(message, slice_of(owned.slices, owner))); });
      co_await check_decoded(net, owner, *slice, "sums");
      co_await write_view(net, slice->view(), output, how.reduction);
      entries += entries_in(slice->view(), how.reduction);
    }
  };
  co_await allgather_any_size(net, std::move(owned.encoded), owned.most_bytes, owned.first_step, taking);
  if (counts) co_await counts->finish();
}

template <class V>
Task<OwnedSlice<V>> sum_by_doubling(Transport& net, const SparseStream<V>& mine, const SparseReduction& how) {
  SparseDoubling<V> doubling(net, mine, how, 0, nullptr);
  co_await doubling.run();
  co_return doubling.take_sum();
}

template <class V>
Task<SparseStream<V>> stream_of(Transport& net, OwnedSlice<V> sum, const SparseReduction& how) {
  const std::vector<StreamView<V>> whole{sum.view()};
  const double delta = memory_delta<V>(sum.range.end, how.switch_factor);
  SparseStream<V> stream;
  co_await decide(net, bytes_of(whole[0]), [&] { stream = join_slices<V>(whole, how.reduction, delta); });
  co_return stream;
}

}  // namespace

template <class V>
Task<SparseStream<V>> allreduce_sparse(Transport& net, SparseStream<V> mine, SparseReduction how) {
  SparseStream<V> sum;
  if (how.algorithm == Algorithm::recursive_doubling) {
    co_return co_await stream_of<V>(net, co_await sum_by_doubling(net, mine, how), how);
  }
  if (!is_open(net, how)) {
    co_await sum_by_slices(net, std::move(mine), how, sum);
    co_return sum;
  }
  OpenSum<V> open(net, std::move(mine), how);
  const SparseVerdict verdict = co_await open.begin();
  if (verdict == SparseVerdict::dense) co_return co_await open.sum_densely();
  if (verdict == SparseVerdict::go_on) co_return co_await stream_of<V>(net, open.take_sum(), how);
  std::vector<Task<void>> both;
  both.push_back(open.doubling().hear_others());
  both.push_back(sum_by_slices(net, open.take_mine(), how, sum));
  co_await when_all(std::move(both));
  open.saw(entries_in(sum.view(), how.reduction));
  co_return sum;
}

template <class V>
Task<void> allreduce_sparse_into(Transport& net, SparseStream<V> mine, SparseReduction how, std::span<V> output) {
  TELEGRAD_CHECK(output.size() == mine.dimension());
  double entries = 0.0;
  OwnedSlice<V> sum;
  if (is_open(net, how)) {
    OpenSum<V> open(net, std::move(mine), how);
    const SparseVerdict verdict = co_await open.begin();
    if (verdict == SparseVerdict::dense) co_await open.sum_densely_into(output);
    if (verdict == SparseVerdict::split) {
      std::vector<Task<void>> both;
      both.push_back(open.doubling().hear_others());
      both.push_back(sum_by_slices_into(net, open.take_mine(), how, output, entries));
      co_await when_all(std::move(both));
      open.saw(entries);
    }
    if (verdict != SparseVerdict::go_on) co_return;
    sum = open.take_sum();
  } else if (how.algorithm == Algorithm::recursive_doubling) {
    sum = co_await sum_by_doubling(net, mine, how);
  } else {
    co_await sum_by_slices_into(net, std::move(mine), how, output, entries);
    co_return;
  }
  const StreamView<V> view = sum.view();
  co_await write_view(net, view, output, how.reduction);
}

#define TELEGRAD_INSTANTIATE(V)                                                                    \
  template Task<SparseStream<V>> allreduce_sparse(Transport&, SparseStream<V>, SparseReduction); \
  template Task<void> allreduce_sparse_into(Transport&, SparseStream<V>, SparseReduction, std::span<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE
template Task<SparseStream<CountedF32>> allreduce_sparse(Transport&, SparseStream<CountedF32>, SparseReduction);

}  // namespace telegrad
