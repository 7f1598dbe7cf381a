#include "collectives/sparse/output.hpp"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "collectives/support/any_size.hpp"
#include "collectives/support/elements.hpp"
#include "kernels/operations.hpp"

namespace telegrad {

template <class V>
double entries_in(const SparseView<V>& view, Reduction reduction) {
  const auto held = static_cast<double>(view.nnz());
  if constexpr (std::is_same_v<V, CountedF32>) {
    return held;
  } else {
    constexpr std::size_t kRun = 64;
    constexpr std::size_t kRuns = 256;
    if (!view.dense || view.values.empty()) return held;
    const auto absent = static_cast<float>(kernels::absent_element<V>(reduction));
    const std::size_t gap = std::max(kRun, view.values.size() / kRuns);
    std::size_t looked_at = 0;
    std::size_t present = 0;
    for (std::size_t begin = 0; begin < view.values.size(); begin += gap) {
      for (const V value : view.values.subspan(begin, std::min(kRun, view.values.size() - begin))) {
        present += static_cast<float>(value) != absent ? 1 : 0;
        ++looked_at;
      }
    }
    return held * static_cast<double>(present) / static_cast<double>(looked_at);
  }
}

template <class V>
Task<void> write_view(Transport& net, const SparseView<V>& view, std::span<V> output, Reduction reduction) {
  const std::uint64_t first = view.range.begin;
  co_await compute_slices(net, static_cast<std::size_t>(view.range.size()), sizeof(V),
                          [&view, first, output, reduction](std::size_t begin, std::size_t end) {
                            write_dense(view.slice({first + begin, first + end}),
                                        output.subspan(first + begin, end - begin), reduction);
                          });
}

template <class V>
Task<void> AssembledSum<V>::begin(std::vector<ClaimedSlice> slices) {
  slices_ = std::move(slices);
  std::vector<SliceContent> contents;
  for (std::size_t slice = 0; slice < slices_.size(); ++slice) {
    const auto& [owner, range, count] = slices_[slice];
    const bool dense = count == kDenseSlice;
    const std::uint64_t nnz = dense ? range.size() : count;
    if (nnz > range.size()) {
      co_await fail(slice, "it says that " + std::to_string(nnz) + " of " + std::to_string(range.size()) +
                               " elements have an entry");
    }
    contents.push_back({range, dense, nnz});
  }
  const double delta = memory_delta<V>(slices_.back().range.end, how_.switch_factor);
  whole_.emplace(std::move(contents), how_.reduction, delta);
}

template <class V>
Task<void> AssembledSum<V>::place(std::size_t slice, SparseView<V> view) {
  co_await decide(net_, bytes_of(view), [&] { whole_->place(slice, view); });
}

template <class V>
Task<void> AssembledSum<V>::place(std::size_t slice, ConstBytes message, const GivenEntries<V>& given) {
  std::string error;
  co_await decide(net_, message.size(), [&] { error = whole_->place(slice, message, given); });
  if (!error.empty()) co_await fail(slice, error);
}

template <class V>
Task<void> AssembledSum<V>::place(std::span<const Arrived> batch) {
  std::size_t bytes = 0;
  for (const Arrived& one : batch) bytes += one.bytes.size();
  Rank owner = 0;
  std::string error;
  co_await decide(net_, bytes, [&] {
    for (std::size_t i = 0; i < batch.size() && error.empty(); ++i) {
      owner = batch[i].source;
      error = whole_->place(owner, batch[i].bytes);
    }
  });
  if (!error.empty()) co_await fail(owner, error);
}

template <class V>
Task<void> AssembledSum<V>::receive(std::size_t slice, Step first_step, std::size_t most_bytes) {
  const auto& [owner, range, count] = slices_[slice];
  Buffer first = co_await net_.receive_any_size(owner, first_step, first_piece_bytes(net_, most_bytes));
  if constexpr (!std::is_same_v<V, CountedF32>) {
    const std::optional<SlicePlace<V>> own = whole_->place_of(slice);
    if (own && begins_sections(first.bytes())) {
      co_await receive_sections(net_, owner, first_step, first.bytes(), range, own->indices, own->values, "sums");
      co_return;
    }
  }
  const ExpectedVector expected{dtype_of<V>, range, most_bytes};
  const Buffer message = co_await receive_rest_of_vector(net_, owner, first_step, std::move(first), expected);
  co_await place(slice, message.bytes());
}

template <class V>
Task<void> WrittenSum<V>::begin(std::vector<ClaimedSlice> slices) {
  slices_ = std::move(slices);
  co_return;
}

template <class V>
Task<void> WrittenSum<V>::place(std::size_t, SparseView<V> view) {
  co_await write_view(net_, view, output_, how_.reduction);
  entries_ += entries_in(view, how_.reduction);
}

template <class V>
Task<void> WrittenSum<V>::place(std::size_t slice, ConstBytes message, const GivenEntries<V>& given) {
  std::optional<Decoded<V>> decoded;
  co_await decide(net_, message.size(), [&] { decoded.emplace(decode_sum<V>(message, slices_[slice].range, given)); });
  co_await check_decoded(net_, slices_[slice].owner, *decoded, "sums");
  co_await place(slice, decoded->view());
}

template <class V>
Task<void> SparseOutput<V>::take(Transport& net, OwnedSlice<V> whole, const SparseReduction& how) {
  const double delta = memory_delta<V>(whole.range.end, how.switch_factor);
  const std::size_t bytes = bytes_of(whole.view());
  co_await decide(net, bytes, [&] { sum = whole_vector(std::move(whole), how.reduction, delta); });
}

template <class V>
Task<void> DenseOutput<V>::take(Transport& net, OwnedSlice<V> whole, const SparseReduction& how) {
  const SparseView<V> view = whole.view();
  co_await write_view(net, view, vector, how.reduction);
}

template <class V>
Task<void> DenseOutput<V>::take(Transport& net, SparseVector<V> whole, const SparseReduction& how) {
  const SparseView<V> view = whole.view();
  co_await write_view(net, view, vector, how.reduction);
}

#define TELEGRAD_INSTANTIATE(V)                                                              \
  template Task<void> write_view(Transport&, const SparseView<V>&, std::span<V>, Reduction); \
  template double entries_in(const SparseView<V>&, Reduction);                               \
  template class AssembledSum<V>;                                                            \
  template class WrittenSum<V>;                                                              \
  template struct SparseOutput<V>;                                                           \
  template struct DenseOutput<V>;
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE
template double entries_in(const SparseView<CountedF32>&, Reduction);
template class AssembledSum<CountedF32>;
template struct SparseOutput<CountedF32>;

}  // namespace telegrad
