#include "collectives/allgather_slices.hpp"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "collectives/allgather_any_size.hpp"
#include "collectives/any_size.hpp"
#include "collectives/counts.hpp"
#include "collectives/exchange_sums.hpp"
#include "collectives/sparse_open.hpp"
#include "collectives/sparse_sections.hpp"
#include "sparse/assembly.hpp"
#include "sparse/known_values.hpp"

namespace telegrad {
namespace {

// Who holds how much is news worth messages of its own where slices are long, and few. The same whatever a rank wants the
// sum as: their messages are alike.
template <class V>
bool counts_go_ahead(const Transport& net, const Partition& slices) {
  return net.size() <= 64 && most_bytes<V>(slices) >= 4 * Transport::kSliceBytes;
}

constexpr Rank kExchangingRanksMost = 8;  // to each of more, little would be left out, and as much encoded

// Whether slices go from their owners to everybody through memory, not round a ring. The same on all ranks.
template <class V>
bool goes_through_memory(const Transport& net, const Partition& slices) {
  return !std::is_same_v<V, CountedF32> && net.shares_memory() && counts_go_ahead<V>(net, slices);
}

template <class V>
bool gathers_in_sections(const Transport& net, const Partition& slices, const StreamView<V>& owned,
                         const SparseReduction& how) {
  if constexpr (std::is_same_v<V, CountedF32>) {
    return false;
  } else {
    return goes_through_memory<V>(net, slices) && goes_in_sections(net, owned, how.wire);
  }
}

template <class V>
std::size_t sent_bytes(const Transport& net, const Partition& slices, const StreamView<V>& owned,
                       const SparseReduction& how) {
  if constexpr (!std::is_same_v<V, CountedF32>) {
    if (gathers_in_sections(net, slices, owned, how)) return encoded_size(plain_header(owned));
  }
  return encoded_size(owned, how.wire);
}

// Whether an owner is to make its slice dense. Where the choice is open, that is where it is shorter in the format of this
// message, not in a usual one.
template <class V>
bool sends_densely(const Transport& net, const Partition& slices, const StreamView<V>& owned,
                   const SparseReduction& how) {
  if (how.algorithm == Algorithm::split_dense_allgather) return true;
  if (how.algorithm != Algorithm::automatic || how.wire.values != ValueEncoding::native) return false;
  const double dense_bytes = how.switch_factor * static_cast<double>(owned.range.size() * sizeof(V));
  const auto longest = static_cast<double>(owned.nnz() * (sizeof(std::uint32_t) + sizeof(V)));
  if (longest <= dense_bytes) return false;
  return static_cast<double>(sent_bytes(net, slices, owned, how)) > dense_bytes + sizeof(StreamHeader);
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
  Task<void> place(Rank owner, ConstBytes message) {
    const Arrived arrived{owner, message};
    co_await place(std::span(&arrived, 1));
  }
  Task<void> place(Rank owner, StreamView<V> view) {
    co_await decide(net_, bytes_of(view), [&] { whole_->place(owner, view); });
  }
  // A message of either sort, of which this rank gave these entries.
  Task<void> place(Rank owner, ConstBytes message, const GivenEntries<V>& given) {
    std::string error;
    co_await decide(net_, message.size(), [&] { error = whole_->place(owner, message, given); });
    if (!error.empty()) co_await fail(owner, error);
  }
  // What `owner` itself sends of its slice.
  Task<void> receive(Rank owner, Step first_step, ExpectedStream expected) {
    Buffer first = co_await net_.receive_any_size(owner, first_step, first_piece_bytes(net_, expected.most_bytes));
    const std::optional<SlicePlace<V>> own = whole_->place_of(owner);
    if (own && begins_sections(first.bytes())) {
      co_await receive_sections(net_, owner, first_step, first.bytes(), expected.range, own->indices, own->values, "sums");
      co_return;
    }
    const Buffer message = co_await receive_rest_of_stream(net_, owner, first_step, std::move(first), expected);
    co_await place(owner, message.bytes());
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

template <class V>
Step step_of_counts(const Transport& net, const EncodedSlice<V>& owned) {
  const Step round_a_ring = (net.size() - 1) * any_size_steps(net, owned.most_bytes);
  return owned.first_step + std::max(round_a_ring, stream_steps(net, owned.most_bytes));
}

template <class V>
Task<void> assemble_as_they_come(Transport& net, EncodedSlice<V> owned, Assembling<V>& whole) {
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
Task<void> assemble_at_the_end(Transport& net, EncodedSlice<V> owned, Assembling<V>& whole) {
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

// Slices written into a vector, and how many entries they have, about.
template <class V>
class Writing {
 public:
  Writing(Transport& net, const EncodedSlice<V>& owned, const SparseReduction& how, std::span<V> output, double& entries)
      : net_(net), owned_(owned), how_(how), output_(output), entries_(entries) {}

  Task<void> write(Rank owner, ConstBytes message) {
    std::optional<Decoded<V>> slice;
    co_await decide(net_, message.size(), [&] {
      slice.emplace(decode_sum<V>(message, slice_of(owned_.slices, owner), given_to(owned_, owner)));
    });
    co_await check_decoded(net_, owner, *slice, "sums");
    co_await write(slice->view());
  }
  Task<void> write_own() {
    return owned_.encoded.empty() ? write(owned_.owned.view()) : write(net_.rank(), owned_.encoded.bytes());
  }

 private:
  Task<void> write(StreamView<V> view) {
    co_await write_view(net_, view, output_, how_.reduction);
    entries_ += entries_in(view, how_.reduction);
  }

  Transport& net_;
  const EncodedSlice<V>& owned_;
  const SparseReduction& how_;
  const std::span<V> output_;
  double& entries_;
};

template <class V>
Task<void> place_own(const Transport& net, const EncodedSlice<V>& owned, Assembling<V>& whole) {
  return owned.encoded.empty() ? whole.place(net.rank(), owned.owned.view())
                               : whole.place(net.rank(), owned.encoded.bytes());
}

template <class V>
Task<void> assemble_exchanged(Transport& net, const EncodedSlice<V>& owned, const WireFormat& format,
                              Assembling<V>& whole) {
  Counts counts(net, step_of_counts(net, owned), owned.count);
  TakingSums taking;
  taking.ready = [&counts] { return counts.all_known(); };
  taking.take = [&](Rank owner, ConstBytes message) -> Task<void> {
    if (!whole.begun()) {
      const std::vector<std::uint64_t> held = co_await counts.wait();
      co_await whole.begin(held);
      co_await place_own(net, owned, whole);
    }
    const GivenEntries<V> given = given_to(owned, owner);
    co_await whole.place(owner, message, given);
  };
  co_await exchange_sums(net, owned, format, taking);
  co_await counts.finish();
}

// Between ranks that share memory: every owner's slice from it to all others.
template <class V>
class ThroughMemory {
 public:
  ThroughMemory(Transport& net, const EncodedSlice<V>& owned)
      : net_(net), owned_(owned), counts_(net, step_of_counts(net, owned), owned.count) {}

  Task<void> assemble(Assembling<V>& whole) {
    std::vector<Task<void>> both = sends();
    both.push_back(take(whole));
    co_await when_all(std::move(both));
    co_await counts_.finish();
  }
  Task<void> write(Writing<V>& output) {
    std::vector<Task<void>> all = sends();
    for (Rank distance = 1; distance < net_.size(); ++distance) all.push_back(write(behind(distance), output));
    all.push_back(output.write_own());
    co_await when_all(std::move(all));
    co_await counts_.finish();
  }

 private:
  Rank behind(Rank distance) const { return (net_.rank() + net_.size() - distance) % net_.size(); }
  ExpectedStream expected(Rank owner) const {
    return {dtype_of<V>, slice_of(owned_.slices, owner), owned_.most_bytes};
  }

  std::vector<Task<void>> sends() {
    std::vector<Task<void>> all;
    for (Rank distance = 1; distance < net_.size(); ++distance) {
      const Rank to = (net_.rank() + distance) % net_.size();
      all.push_back(owned_.encoded.empty() ? send_in_sections(net_, to, owned_.first_step, owned_.owned.view())
                                           : send_any_size(net_, to, owned_.first_step, owned_.encoded.bytes()));
    }
    return all;
  }

  Task<void> take(Assembling<V>& whole) {
    const std::vector<std::uint64_t> counts = co_await counts_.wait();
    co_await whole.begin(counts);
    std::vector<Task<void>> all;
    all.push_back(place_own(net_, owned_, whole));
    for (Rank distance = 1; distance < net_.size(); ++distance) {
      all.push_back(whole.receive(behind(distance), owned_.first_step, expected(behind(distance))));
    }
    co_await when_all(std::move(all));
  }

  Task<void> write(Rank owner, Writing<V>& output) {
    const Buffer message = co_await receive_stream(net_, owner, owned_.first_step, expected(owner));
    co_await output.write(owner, message.bytes());
  }

  Transport& net_;
  const EncodedSlice<V>& owned_;
  Counts counts_;
};

}  // namespace

template <class V>
bool exchanges_sums(const Transport& net, const Partition& slices, const SparseReduction& how) {
  const bool few = net.size() > 1 && net.size() <= kExchangingRanksMost;
  return few && !net.shares_memory() && how.wire.values == ValueEncoding::native && counts_go_ahead<V>(net, slices);
}

template <class V>
Task<void> encode_slice(Transport& net, OwnedSlice<V> owned, const SparseReduction& how, float weight,
                        EncodedSlice<V>& result) {
  if (!owned.dense && sends_densely(net, result.slices, owned.view(), how)) {
    const auto bytes = static_cast<std::size_t>(owned.range.size()) * sizeof(V);
    co_await decide(net, bytes, [&] { owned = dense_slice(owned.view(), how.reduction); });
  }
  result.most_bytes = most_bytes<V>(result.slices);
  result.count = owned.dense ? kDenseSlice : owned.view().nnz();
  // Where bytes are not dear enough for packing, the work takes longer than what it saves: 1.3 ns an entry and receiver.
  const bool leaves_out = result.addends.has_value() && !owned.dense && how.wire.packs_values;
  if (result.addends && !leaves_out) result.addends->given = {};
  if (leaves_out || gathers_in_sections(net, result.slices, owned.view(), how)) {
    result.owned = std::move(owned);
    co_return;
  }
  co_await decide(net, bytes_of(owned.view()), [&] { result.encoded = encode_keeping_error(owned.view(), how, weight); });
}

template <class V>
Task<SparseStream<V>> allgather_slices(Transport& net, EncodedSlice<V> owned, const SparseReduction& how) {
  Assembling<V> whole(net, owned.slices, how);
  if constexpr (!std::is_same_v<V, CountedF32>) {
    if (goes_through_memory<V>(net, owned.slices)) {
      ThroughMemory<V> memory(net, owned);
      co_await memory.assemble(whole);
      co_return whole.finish();
    }
  }
  if (exchanges_sums<V>(net, owned.slices, how)) {
    co_await assemble_exchanged(net, owned, how.wire, whole);
    co_return whole.finish();
  }
  TELEGRAD_CHECK(!owned.encoded.empty());
  if (counts_go_ahead<V>(net, owned.slices)) {
    co_await assemble_as_they_come(net, std::move(owned), whole);
  } else {
    co_await assemble_at_the_end(net, std::move(owned), whole);
  }
  co_return whole.finish();
}

template <class V>
Task<void> allgather_slices_into(Transport& net, EncodedSlice<V> owned, const SparseReduction& how, std::span<V> output,
                                 double& entries) {
  Writing<V> writing(net, owned, how, output, entries);
  if (goes_through_memory<V>(net, owned.slices)) {
    ThroughMemory<V> memory(net, owned);
    co_await memory.write(writing);
    co_return;
  }
  std::optional<Counts> counts;
  if (counts_go_ahead<V>(net, owned.slices)) counts.emplace(net, step_of_counts(net, owned), owned.count);
  if (exchanges_sums<V>(net, owned.slices, how)) {
    TakingSums taking;
    taking.ready = [] { return true; };
    taking.take = [&](Rank owner, ConstBytes message) { return writing.write(owner, message); };
    co_await writing.write_own();
    co_await exchange_sums(net, owned, how.wire, taking);
  } else {
    TELEGRAD_CHECK(!owned.encoded.empty());
    Taking taking;
    taking.take = [&](std::span<const Arrived> batch) -> Task<void> {
      for (const auto& [owner, message] : batch) co_await writing.write(owner, message);
    };
    co_await allgather_any_size(net, std::move(owned.encoded), owned.most_bytes, owned.first_step, taking);
  }
  if (counts) co_await counts->finish();
}

#define TELEGRAD_INSTANTIATE(V)                                                                                      \
  template bool exchanges_sums<V>(const Transport&, const Partition&, const SparseReduction&);                         \
  template Task<void> encode_slice(Transport&, OwnedSlice<V>, const SparseReduction&, float, EncodedSlice<V>&);        \
  template Task<SparseStream<V>> allgather_slices(Transport&, EncodedSlice<V>, const SparseReduction&);
#define TELEGRAD_INSTANTIATE_INTO(V) \
  template Task<void> allgather_slices_into(Transport&, EncodedSlice<V>, const SparseReduction&, std::span<V>, double&);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE_INTO)
#undef TELEGRAD_INSTANTIATE
#undef TELEGRAD_INSTANTIATE_INTO

}  // namespace telegrad
