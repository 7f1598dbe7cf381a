#include "collectives/allgather_slices.hpp"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/allgather_any_size.hpp"
#include "collectives/any_size.hpp"
#include "collectives/counts.hpp"
#include "collectives/sparse_open.hpp"
#include "sparse/assembly.hpp"

namespace telegrad {
namespace {

// Who holds how much is news worth messages of its own where slices are long, and few. The same whatever a rank wants the
// sum as: their messages are alike.
template <class V>
bool counts_go_ahead(const Transport& net, const Partition& slices) {
  return net.size() <= 64 && most_bytes<V>(slices) >= 4 * Transport::kSliceBytes;
}

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
      const bool dense = counts[owner] == kDenseSlice;
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

Step step_of_counts(const Transport& net, const EncodedSlice& owned) {
  return owned.first_step + (net.size() - 1) * any_size_steps(net, owned.most_bytes);
}

template <class V>
Task<void> assemble_as_they_come(Transport& net, EncodedSlice owned, Assembling<V>& whole) {
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
Task<void> assemble_at_the_end(Transport& net, EncodedSlice owned, Assembling<V>& whole) {
  const Rank size = net.size();
  const Taking nothing;
  const KeptMessages kept =
      co_await allgather_any_size(net, std::move(owned.encoded), owned.most_bytes, owned.first_step, nothing);
  const std::vector<ConstBytes> messages = kept.by_source(size);
  std::vector<std::uint64_t> counts;
  for (Rank owner = 0; owner < size; ++owner) {
    const StreamHeader header = claimed_header(messages[owner]);
    counts.push_back(header.kind == StreamKind::dense ? kDenseSlice : header.nnz);
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
Task<void> encode_slice(Transport& net, OwnedSlice<V> owned, const SparseReduction& how, float weight,
                        EncodedSlice& result) {
  if (!owned.dense && sends_densely(owned.view(), how)) {
    const auto bytes = static_cast<std::size_t>(owned.range.size()) * sizeof(V);
    co_await decide(net, bytes, [&] { owned = dense_slice(owned.view(), how.reduction); });
  }
  result.most_bytes = most_bytes<V>(result.slices);
  result.count = owned.dense ? kDenseSlice : owned.view().nnz();
  co_await decide(net, bytes_of(owned.view()), [&] { result.encoded = encode_keeping_error(owned.view(), how, weight); });
}

template <class V>
Task<SparseStream<V>> allgather_slices(Transport& net, EncodedSlice owned, const SparseReduction& how) {
  Assembling<V> whole(net, owned.slices, how);
  if (counts_go_ahead<V>(net, owned.slices)) {
    co_await assemble_as_they_come(net, std::move(owned), whole);
  } else {
    co_await assemble_at_the_end(net, std::move(owned), whole);
  }
  co_return whole.finish();
}

template <class V>
Task<void> allgather_slices_into(Transport& net, EncodedSlice owned, const SparseReduction& how, std::span<V> output,
                                 double& entries) {
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

#define TELEGRAD_INSTANTIATE(V)                                                                                      \
  template Task<void> encode_slice(Transport&, OwnedSlice<V>, const SparseReduction&, float, EncodedSlice&);        \
  template Task<SparseStream<V>> allgather_slices(Transport&, EncodedSlice, const SparseReduction&);
#define TELEGRAD_INSTANTIATE_INTO(V) \
  template Task<void> allgather_slices_into(Transport&, EncodedSlice, const SparseReduction&, std::span<V>, double&);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE_INTO)
#undef TELEGRAD_INSTANTIATE
#undef TELEGRAD_INSTANTIATE_INTO

}  // namespace telegrad
