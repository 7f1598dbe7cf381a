#include "session/staged.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/check.hpp"
#include "collectives/sparse/auto.hpp"
#include "collectives/sparse/output.hpp"
#include "collectives/support/elements.hpp"
#include "kernels/scan.hpp"

namespace telegrad {
namespace {

// In slices of work: other operations have their turn, however many entries there are.
template <class T>
Task<void> copy_to(Transport& net, std::span<const T> from, Array<T>& to) {
  to = Array<T>(from.size());
  co_await copy(net, std::as_bytes(from), std::as_writable_bytes(to.span()));
}

Task<void> validate(Transport& net, std::uint64_t dimension, std::span<const std::uint32_t> indices) {
  bool ordered = true;
  co_await compute_slices(net, indices.size(), sizeof(indices[0]), [&](std::size_t begin, std::size_t end) {
    const std::size_t first = begin == 0 ? 0 : begin - 1;
    ordered = ordered && kernels::strictly_increasing(indices.subspan(first, end - first));
  });
  if (ordered && (indices.empty() || indices.back() < dimension)) co_return;
  try {
    validate_entries(dimension, indices, indices.size());
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string("the device's entries are no sparse vector: ") + error.what());
  }
}

std::size_t held(std::int64_t count, std::size_t room) {
  if (count >= 0 && static_cast<std::uint64_t>(count) <= room) return static_cast<std::size_t>(count);
  throw std::invalid_argument("the device counts " + std::to_string(count) + " entries, but there is room for 0 to " +
                              std::to_string(room) + ": select no more, or give longer tensors");
}

// The device may write it again: what is checked must be what is used.
std::int64_t count_once(const std::int64_t* count) { return __atomic_load_n(count, __ATOMIC_ACQUIRE); }

// The indices are copied before they are checked: nobody can change them then.
template <class V>
Task<void> read(Transport& net, const StagedEntries<V>& staged, const SparseReduction& how, SparseVector<V>& vector) {
  const std::size_t count = held(count_once(staged.count), staged.indices.size());
  const std::span<const V> staged_values = staged.values.first(count);
  Array<std::uint32_t> indices;
  co_await copy_to(net, staged.indices.first(count), indices);
  co_await validate(net, staged.dimension, indices.span());
  if (begins_densely<V>(staged.dimension, count, how)) {
    Array<V> dense(static_cast<std::size_t>(staged.dimension));
    const SparseView<V> view{{0, staged.dimension}, false, indices.span(), staged_values};
    co_await write_view(net, view, dense.span(), how.reduction);
    vector = SparseVector<V>::adopt_dense(std::move(dense));
    co_return;
  }
  Array<V> values;
  co_await copy_to(net, staged_values, values);
  vector = SparseVector<V>::adopt_sparse(staged.dimension, std::move(indices), std::move(values));
}

template <class V>
Task<void> write_sum(Transport& net, const SparseVector<V>& sum, StagedSum<V> out, Reduction reduction) {
  const SparseView<V> view = sum.view();
  if (view.dense || view.nnz() > out.indices.size()) {
    co_await write_view(net, view, out.dense, reduction);
    *out.form = kDenseForm;
    co_return;
  }
  co_await copy(net, std::as_bytes(view.indices), std::as_writable_bytes(out.indices.first(view.nnz())));
  co_await copy(net, std::as_bytes(view.values), std::as_writable_bytes(out.values.first(view.nnz())));
  *out.form = static_cast<std::int64_t>(view.nnz());
}

Task<void> clear(Transport& net, std::span<float> dense) {
  co_await compute_slices(net, dense.size(), sizeof(float), [&](std::size_t begin, std::size_t end) {
    std::ranges::fill(dense.subspan(begin, end - begin), 0.0F);
  });
}

// Few are not 0, and the bus to the device is slower than memory: these alone, where they fit.
Task<void> write_errors(Transport& net, StagedSum<float> lost) {
  std::size_t count = 0;
  co_await compute_slices(net, lost.dense.size(), sizeof(float), [&](std::size_t begin, std::size_t end) {
    const auto own = lost.dense.subspan(begin, end - begin);
    count += own.size() - static_cast<std::size_t>(std::ranges::count(own, 0.0F));
  });
  if (count > lost.indices.size()) {
    *lost.form = kDenseForm;
    co_return;
  }
  Array<std::uint32_t> indices(count);
  Array<float> values(count);
  std::size_t found = 0;
  co_await compute_slices(net, lost.dense.size(), sizeof(float), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      if (lost.dense[i] == 0.0F) continue;
      indices.span()[found] = static_cast<std::uint32_t>(i);
      values.span()[found] = lost.dense[i];
      ++found;
    }
  });
  co_await copy(net, std::as_bytes(indices.span()), std::as_writable_bytes(lost.indices.first(count)));
  co_await copy(net, std::as_bytes(values.span()), std::as_writable_bytes(lost.values.first(count)));
  *lost.form = static_cast<std::int64_t>(count);
}

}  // namespace

template <class V>
Task<void> allreduce_staged(Transport& net, StagedEntries<V> mine, SparseReduction how, StagedSum<V> sum,
                            StagedSum<float> lost) {
  TELEGRAD_CHECK(mine.indices.size() == mine.values.size() && sum.indices.size() == sum.values.size());
  TELEGRAD_CHECK(sum.dense.size() == mine.dimension);
  how.wire.key.rank = net.rank();
  if (lost.form != nullptr) {
    TELEGRAD_CHECK(dtype_of<V> == DType::f32 && lost.dense.size() == mine.dimension &&
                   lost.indices.size() == lost.values.size());
    co_await clear(net, lost.dense);
    how.residual = lost.dense;
  }
  SparseVector<V> vector;
  co_await read(net, mine, how, vector);
  if (how.observation) co_await how.observation->begin(net.ready());
  const SparseVector<V> total = co_await allreduce_sparse(net, std::move(vector), how);
  if (how.observation) how.observation->end();
  if (lost.form != nullptr) co_await write_errors(net, lost);
  co_await write_sum(net, total, sum, how.reduction);
}

#define TELEGRAD_INSTANTIATE(V)                                                                     \
  template Task<void> allreduce_staged(Transport&, StagedEntries<V>, SparseReduction, StagedSum<V>, \
                                       StagedSum<float>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
