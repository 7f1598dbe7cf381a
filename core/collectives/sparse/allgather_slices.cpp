#include "collectives/sparse/allgather_slices.hpp"

#include <algorithm>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "collectives/sparse/sections.hpp"
#include "collectives/support/allgather_any_size.hpp"
#include "collectives/support/any_size.hpp"
#include "collectives/support/counts.hpp"

namespace telegrad {
namespace {

// Whether slices go from their owners to everybody through memory, not round a ring. The same on all ranks.
template <class V>
bool goes_through_memory(const Transport& net, const Partition& slices) {
  return !std::is_same_v<V, CountedF32> && net.shares_memory() && counts_go_ahead<V>(net, slices);
}

template <class V>
bool gathers_in_sections(const Transport& net, const Partition& slices, const SparseView<V>& owned,
                         const SparseReduction& how) {
  if constexpr (std::is_same_v<V, CountedF32>) {
    return false;
  } else {
    return goes_through_memory<V>(net, slices) && goes_in_sections(net, owned, how.wire);
  }
}

template <class V>
std::size_t sent_bytes(const Transport& net, const Partition& slices, const SparseView<V>& owned,
                       const SparseReduction& how) {
  if constexpr (!std::is_same_v<V, CountedF32>) {
    if (gathers_in_sections(net, slices, owned, how)) return encoded_size(plain_header(owned));
  }
  return encoded_size(owned, how.wire);
}

std::vector<ClaimedSlice> claimed(const Partition& slices, Rank owners) {
  std::vector<ClaimedSlice> all;
  for (Rank owner = 0; owner < owners; ++owner) all.push_back({owner, slice_of(slices, owner)});
  return all;
}

// `counts`: of each rank, one.
std::vector<ClaimedSlice> claimed(const Partition& slices, const std::vector<RankCounts>& counts) {
  std::vector<ClaimedSlice> all = claimed(slices, static_cast<Rank>(counts.size()));
  for (ClaimedSlice& one : all) one.count = counts[one.owner][0];
  return all;
}

template <class V>
Step step_of_counts(const Transport& net, const EncodedSlice<V>& owned) {
  const Step round_a_ring = (net.size() - 1) * any_size_steps(net, owned.most_bytes);
  return owned.first_step + std::max(round_a_ring, vector_steps(net, owned.most_bytes));
}

template <class V>
Task<void> assemble_as_they_come(Transport& net, EncodedSlice<V> owned, AssembledSum<V>& whole) {
  Counts counts(net, step_of_counts(net, owned), 1);
  counts.say({owned.count});
  Taking taking;
  taking.ready = [&counts] { return counts.all_known(); };
  taking.take = [&](std::span<const Arrived> batch) -> Task<void> {
    if (!whole.begun()) {
      const std::vector<RankCounts> held = co_await counts.wait();
      co_await whole.begin(claimed(owned.slices, held));
    }
    co_await whole.place(batch);
  };
  co_await allgather_any_size(net, std::move(owned.encoded), owned.most_bytes, owned.first_step, taking);
  co_await counts.finish();
}

template <class V>
Task<void> assemble_at_the_end(Transport& net, EncodedSlice<V> owned, AssembledSum<V>& whole) {
  const Rank size = net.size();
  const Taking nothing;
  const KeptMessages kept =
      co_await allgather_any_size(net, std::move(owned.encoded), owned.most_bytes, owned.first_step, nothing);
  const std::vector<ConstBytes> messages = kept.by_source(size);
  std::vector<ClaimedSlice> slices = claimed(owned.slices, size);
  for (ClaimedSlice& one : slices) {
    const VectorHeader header = claimed_header(messages[one.owner]);
    one.count = header.kind == VectorKind::dense ? kDenseSlice : header.nnz;
  }
  co_await whole.begin(std::move(slices));
  for (Rank owner = 0; owner < size;) {
    std::vector<Arrived> batch;
    for (std::size_t bytes = 0; owner < size && bytes < Transport::kTurnBytes; ++owner) {
      batch.push_back({owner, messages[owner]});
      bytes += messages[owner].size();
    }
    co_await whole.place(batch);
  }
}

template <class V, class To>
Task<void> place_own(const Transport& net, const EncodedSlice<V>& owned, To& whole) {
  return owned.encoded.empty() ? whole.place(net.rank(), owned.owned.view())
                               : whole.place(net.rank(), owned.encoded.bytes());
}

// Between ranks that share memory: every owner's slice from it to all others.
template <class V>
class ThroughMemory {
 public:
  ThroughMemory(Transport& net, const EncodedSlice<V>& owned)
      : net_(net), owned_(owned), counts_(net, step_of_counts(net, owned), 1) {
    counts_.say({owned.count});
  }

  Task<void> assemble(AssembledSum<V>& whole) {
    std::vector<Task<void>> both = sends();
    both.push_back(take(whole));
    co_await when_all(std::move(both));
    co_await counts_.finish();
  }
  Task<void> write(WrittenSum<V>& output) {
    co_await output.begin(claimed(owned_.slices, net_.size()));
    std::vector<Task<void>> all = sends();
    for (Rank distance = 1; distance < net_.size(); ++distance) all.push_back(write(behind(distance), output));
    all.push_back(place_own(net_, owned_, output));
    co_await when_all(std::move(all));
    co_await counts_.finish();
  }

 private:
  Rank behind(Rank distance) const { return (net_.rank() + net_.size() - distance) % net_.size(); }

  std::vector<Task<void>> sends() {
    std::vector<Task<void>> all;
    for (Rank distance = 1; distance < net_.size(); ++distance) {
      const Rank to = (net_.rank() + distance) % net_.size();
      all.push_back(owned_.encoded.empty() ? send_in_sections(net_, to, owned_.first_step, owned_.owned.view())
                                           : send_any_size(net_, to, owned_.first_step, owned_.encoded.bytes()));
    }
    return all;
  }

  Task<void> take(AssembledSum<V>& whole) {
    const std::vector<RankCounts> counts = co_await counts_.wait();
    co_await whole.begin(claimed(owned_.slices, counts));
    std::vector<Task<void>> all;
    all.push_back(place_own(net_, owned_, whole));
    for (Rank distance = 1; distance < net_.size(); ++distance) {
      all.push_back(whole.receive(behind(distance), owned_.first_step, owned_.most_bytes));
    }
    co_await when_all(std::move(all));
  }

  Task<void> write(Rank owner, WrittenSum<V>& output) {
    const ExpectedVector expected{dtype_of<V>, slice_of(owned_.slices, owner), owned_.most_bytes};
    const Buffer message = co_await receive_vector(net_, owner, owned_.first_step, expected);
    co_await output.place(owner, message.bytes());
  }

  Transport& net_;
  const EncodedSlice<V>& owned_;
  Counts counts_;
};

}  // namespace

template <class V>
Task<void> encode_slice(Transport& net, OwnedSlice<V> owned, const SparseReduction& how, float weight,
                        EncodedSlice<V>& result) {
  const auto sent = [&](const SparseView<V>& view) { return sent_bytes(net, result.slices, view, how); };
  if (sends_densely(owned.view(), how, sent)) co_await make_dense(net, owned, how);
  result.most_bytes = most_bytes<V>(result.slices);
  result.count = announced_count(owned.view());
  if (gathers_in_sections(net, result.slices, owned.view(), how)) {
    result.owned = std::move(owned);
    co_return;
  }
  co_await decide(net, bytes_of(owned.view()), [&] { result.encoded = encode_keeping_error(owned.view(), how, weight); });
}

template <class V>
Task<void> allgather_slices(Transport& net, EncodedSlice<V> owned, const SparseReduction& how, SparseOutput<V>& out) {
  AssembledSum<V> whole = out.slices(net, how);
  if constexpr (!std::is_same_v<V, CountedF32>) {
    if (goes_through_memory<V>(net, owned.slices)) {
      ThroughMemory<V> memory(net, owned);
      co_await memory.assemble(whole);
      out.take(whole);
      co_return;
    }
  }
  TELEGRAD_CHECK(!owned.encoded.empty());
  if (counts_go_ahead<V>(net, owned.slices)) {
    co_await assemble_as_they_come(net, std::move(owned), whole);
  } else {
    co_await assemble_at_the_end(net, std::move(owned), whole);
  }
  out.take(whole);
}

template <class V>
Task<void> allgather_slices(Transport& net, EncodedSlice<V> owned, const SparseReduction& how, DenseOutput<V>& out) {
  WrittenSum<V> whole = out.slices(net, how);
  if (goes_through_memory<V>(net, owned.slices)) {
    ThroughMemory<V> memory(net, owned);
    co_await memory.write(whole);
    co_return;
  }
  std::optional<Counts> counts;
  if (counts_go_ahead<V>(net, owned.slices)) {
    counts.emplace(net, step_of_counts(net, owned), 1);
    counts->say({owned.count});
  }
  TELEGRAD_CHECK(!owned.encoded.empty());
  co_await whole.begin(claimed(owned.slices, net.size()));
  Taking taking;
  taking.take = [&](std::span<const Arrived> batch) -> Task<void> {
    for (const auto& [owner, message] : batch) co_await whole.place(owner, message);
  };
  co_await allgather_any_size(net, std::move(owned.encoded), owned.most_bytes, owned.first_step, taking);
  if (counts) co_await counts->finish();
}

#define TELEGRAD_INSTANTIATE(V) \
  template Task<void> encode_slice(Transport&, OwnedSlice<V>, const SparseReduction&, float, EncodedSlice<V>&);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
#undef TELEGRAD_INSTANTIATE
#define TELEGRAD_INSTANTIATE(V, Out) \
  template Task<void> allgather_slices(Transport&, EncodedSlice<V>, const SparseReduction&, Out<V>&);
TELEGRAD_FOR_SPARSE_OUTPUTS(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
