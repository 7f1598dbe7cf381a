#include "session/staged.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include "base/check.hpp"
#include "collectives/allreduce_sparse.hpp"
#include "collectives/elements.hpp"
#include "collectives/sparse_open.hpp"

namespace telegrad {
namespace {

template <class V>
SparseStream<V> stream_of(const StagedEntries<V>& staged, const SparseReduction& how) {
  const std::int64_t count = *staged.count;  // once: it may be anything
  const std::size_t room = staged.indices.size();
  if (count < 0 || static_cast<std::uint64_t>(count) > room) {
    throw std::invalid_argument("the device counts " + std::to_string(count) + " entries, but there is room for 0 to " +
                                std::to_string(room) + ": select no more, or give longer tensors");
  }
  const auto held = static_cast<std::size_t>(count);
  try {
    return addend_of<V>(staged.dimension, staged.indices.first(held), staged.values.first(held), how);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string("the device's entries are no sparse stream: ") + error.what());
  }
}

template <class V>
Task<void> write_sum(Transport& net, const SparseStream<V>& sum, StagedSum<V> out, Reduction reduction) {
  const StreamView<V> view = sum.view();
  if (view.dense || view.nnz() > out.indices.size()) {
    co_await write_view(net, view, out.dense, reduction);
    *out.form = kDenseForm;
    co_return;
  }
  co_await copy(net, std::as_bytes(view.indices), std::as_writable_bytes(out.indices.first(view.nnz())));
  co_await copy(net, std::as_bytes(view.values), std::as_writable_bytes(out.values.first(view.nnz())));
  *out.form = static_cast<std::int64_t>(view.nnz());
}

}  // namespace

template <class V>
Task<void> allreduce_staged(Transport& net, StagedEntries<V> mine, SparseReduction how, StagedSum<V> sum) {
  TELEGRAD_CHECK(mine.indices.size() == mine.values.size() && sum.indices.size() == sum.values.size());
  TELEGRAD_CHECK(sum.dense.size() == mine.dimension);
  how.wire.key.rank = net.rank();
  SparseStream<V> stream;
  co_await decide(net, mine.indices.size_bytes() + mine.values.size_bytes(), [&] { stream = stream_of(mine, how); });
  const SparseStream<V> total = co_await allreduce_sparse(net, std::move(stream), how);
  co_await write_sum(net, total, sum, how.reduction);
}

#define TELEGRAD_INSTANTIATE(V) \
  template Task<void> allreduce_staged(Transport&, StagedEntries<V>, SparseReduction, StagedSum<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
