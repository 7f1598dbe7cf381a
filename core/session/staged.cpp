#include "session/staged.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "collectives/sparse/allgather.hpp"
#include "collectives/sparse/auto.hpp"
#include "collectives/sparse/output.hpp"
#include "collectives/sparse/reduce_scatter.hpp"
#include "collectives/support/elements.hpp"
#include "kernels/arithmetic.hpp"
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

// Whether the wire loses anything that is wanted; then it is added to zeros.
template <class V>
Task<void> begin_lost(Transport& net, std::uint64_t dimension, StagedSum<float> lost, SparseReduction& how) {
  how.wire.key.rank = net.rank();
  if (lost.form == nullptr) co_return;
  TELEGRAD_CHECK(dtype_of<V> == DType::f32 && lost.dense.size() == dimension && lost.indices.size() == lost.values.size());
  co_await clear(net, lost.dense);
  how.residual = lost.dense;
}

// Of unsigned integers whose order counts; there and back.
template <class V>
Task<void> flip_where_asked(Transport& net, const SparseReduction& how, std::span<V> values) {
  if constexpr (std::is_integral_v<V>) {
    if (!how.flips_signs()) co_return;
    co_await compute_slices(net, values.size(), sizeof(V), [values](std::size_t begin, std::size_t end) {
      flip_signs(values.subspan(begin, end - begin));
    });
  }
  co_return;
}
template <class V>
Task<void> write_flipped(Transport& net, const SparseVector<V>& total, StagedSum<V> sum, const SparseReduction& how) {
  co_await write_staged(net, total, sum, how.reduction);
  const bool is_dense = *sum.form == kDenseForm;
  co_await flip_where_asked(net, how, is_dense ? sum.dense : sum.values.first(static_cast<std::size_t>(*sum.form)));
}

}  // namespace

template <class V>
Task<SparseVector<V>> read_staged(Transport& net, StagedEntries<V> mine) {
  TELEGRAD_CHECK(mine.indices.size() == mine.values.size());
  const std::size_t count = held(count_once(mine.count), mine.indices.size());
  Array<std::uint32_t> indices;
  co_await copy_to(net, mine.indices.first(count), indices);
  co_await validate(net, mine.dimension, indices.span());
  Array<V> values;
  co_await copy_to(net, mine.values.first(count), values);
  co_return SparseVector<V>::adopt_sparse(mine.dimension, std::move(indices), std::move(values));
}

template <class V>
Task<void> write_staged(Transport& net, const SparseVector<V>& sum, StagedSum<V> out, Reduction reduction) {
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

Task<void> clear_lost(Transport& net, StagedSum<float> lost) {
  if (lost.form != nullptr) co_await clear(net, lost.dense);
}

template <class V>
Task<void> write_lost(Transport& net, const SparseVector<V>& left, StagedSum<float> lost) {
  if (lost.form == nullptr) co_return;
  const SparseView<V> view = left.view();
  TELEGRAD_CHECK(!view.dense && lost.dense.size() == left.dimension());
  co_await compute_slices(net, view.nnz(), sizeof(V), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const auto value = static_cast<float>(view.values[i]);
      if (std::isfinite(value)) lost.dense[view.indices[i]] += value;
    }
  });
  co_await write_errors(net, lost);
}

template <class V>
Task<void> average_gathered_staged(Transport& net, StagedEntries<V> mine, SparseReduction how, StagedSum<V> average,
                                   StagedSum<float> lost) {
  using Sum = kernels::Factor<V>;
  how.wire.key.rank = net.rank();
  if (lost.form != nullptr) {
    co_await clear_lost(net, lost);
    if constexpr (std::is_same_v<V, float>) how.residual = lost.dense;
  }
  SparseVector<V> vector = co_await read_staged(net, mine);
  const std::vector<SparseVector<V>> all = co_await allgather_sparse(net, std::move(vector), how);
  std::size_t gathered = 0;
  for (const SparseVector<V>& one : all) gathered += one.nnz();
  std::vector<std::uint32_t> touched;
  touched.reserve(gathered);
  Array<Sum> sums(static_cast<std::size_t>(mine.dimension));
  std::ranges::fill(sums.span(), Sum{0});
  for (const SparseVector<V>& one : all) {
    const SparseView<V> view = one.view();
    TELEGRAD_CHECK(!view.dense);
    touched.insert(touched.end(), view.indices.begin(), view.indices.end());
    co_await compute_slices(net, view.nnz(), sizeof(V), [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        Sum& sum = sums.span()[view.indices[i]];
        sum = kernels::canonical(sum + static_cast<Sum>(view.values[i]));
      }
    });
  }
  std::ranges::sort(touched);
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  Array<std::uint32_t> indices(touched.size());
  Array<V> values(touched.size());
  const Sum ranks = static_cast<Sum>(all.size());
  co_await compute_slices(net, touched.size(), sizeof(V), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      indices.span()[i] = touched[i];
      values.span()[i] = static_cast<V>(sums.span()[touched[i]] / ranks);
    }
  });
  const auto total = SparseVector<V>::adopt_sparse(mine.dimension, std::move(indices), std::move(values));
  if (lost.form != nullptr) co_await write_errors(net, lost);
  co_await write_staged(net, total, average, Reduction::avg);
}

template <class V>
Task<void> allreduce_staged(Transport& net, StagedEntries<V> mine, SparseReduction how, StagedSum<V> sum,
                            StagedSum<float> lost) {
  TELEGRAD_CHECK(mine.indices.size() == mine.values.size() && sum.indices.size() == sum.values.size());
  TELEGRAD_CHECK(sum.dense.size() == mine.dimension);
  co_await begin_lost<V>(net, mine.dimension, lost, how);
  SparseVector<V> vector;
  co_await read(net, mine, how, vector);
  co_await flip_where_asked(net, how, vector.own_values());
  if (how.observation) co_await how.observation->begin(net.ready());
  const SparseVector<V> total = co_await allreduce_sparse(net, std::move(vector), how);
  if (how.observation) how.observation->end();
  if (lost.form != nullptr) co_await write_errors(net, lost);
  co_await write_flipped(net, total, sum, how);
}

template <class V>
Task<void> reduce_scatter_staged(Transport& net, StagedEntries<V> mine, Partition slices, SparseReduction how,
                                 StagedSum<V> sum, StagedSum<float> lost) {
  const Range own = slices[net.rank()];
  TELEGRAD_CHECK(sum.indices.size() == sum.values.size() && sum.dense.size() == own.size());
  co_await begin_lost<V>(net, mine.dimension, lost, how);
  SparseVector<V> vector = co_await read_staged(net, mine);
  co_await flip_where_asked(net, how, vector.own_values());
  SparseVector<V> slice = co_await reduce_scatter_sparse(net, std::move(vector), std::move(slices), how);
  TELEGRAD_CHECK(!slice.is_dense());
  Array<std::uint32_t> indices = slice.take_indices();
  co_await compute_slices(net, indices.size(), sizeof(std::uint32_t), [&](std::size_t begin, std::size_t end) {
    for (std::uint32_t& index : indices.span().subspan(begin, end - begin)) index -= static_cast<std::uint32_t>(own.begin);
  });
  const auto total = SparseVector<V>::adopt_sparse(own.size(), std::move(indices), slice.take_values());
  if (lost.form != nullptr) co_await write_errors(net, lost);
  co_await write_flipped(net, total, sum, how);
}

template <class V>
Task<void> allgather_staged(Transport& net, StagedEntries<V> mine, SparseReduction how, StagedSum<V> all,
                            StagedSum<float> lost) {
  TELEGRAD_CHECK(all.indices.size() == all.values.size() && all.indices.size() % net.size() == 0);
  const std::size_t room = all.indices.size() / net.size();
  co_await begin_lost<V>(net, mine.dimension, lost, how);
  SparseVector<V> vector = co_await read_staged(net, mine);
  const std::vector<SparseVector<V>> vectors = co_await allgather_sparse(net, std::move(vector), how);
  for (Rank rank = 0; rank < net.size(); ++rank) {
    const SparseView<V> view = vectors[rank].view();
    TELEGRAD_CHECK(!view.dense);
    if (view.nnz() > room) {
      throw std::invalid_argument("rank " + std::to_string(rank) + " has " + std::to_string(view.nnz()) +
                                  " entries, but rank " + std::to_string(net.rank()) + " has room for " +
                                  std::to_string(room) + " of each: give tensors of the same length on all ranks");
    }
    co_await copy(net, std::as_bytes(view.indices), std::as_writable_bytes(all.indices.subspan(rank * room, view.nnz())));
    co_await copy(net, std::as_bytes(view.values), std::as_writable_bytes(all.values.subspan(rank * room, view.nnz())));
    all.form[rank] = static_cast<std::int64_t>(view.nnz());
  }
  if (lost.form != nullptr) co_await write_errors(net, lost);
}

#define TELEGRAD_INSTANTIATE(V)                                                                             \
  template Task<void> allreduce_staged(Transport&, StagedEntries<V>, SparseReduction, StagedSum<V>,         \
                                       StagedSum<float>);                                                   \
  template Task<void> reduce_scatter_staged(Transport&, StagedEntries<V>, Partition, SparseReduction,       \
                                            StagedSum<V>, StagedSum<float>);                                \
  template Task<void> allgather_staged(Transport&, StagedEntries<V>, SparseReduction, StagedSum<V>,         \
                                       StagedSum<float>);                                                   \
  template Task<SparseVector<V>> read_staged(Transport&, StagedEntries<V>);                                 \
  template Task<void> write_staged(Transport&, const SparseVector<V>&, StagedSum<V>, Reduction);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE
#define TELEGRAD_INSTANTIATE(V)                                                                     \
  template Task<void> write_lost(Transport&, const SparseVector<V>&, StagedSum<float>);             \
  template Task<void> average_gathered_staged(Transport&, StagedEntries<V>, SparseReduction,        \
                                              StagedSum<V>, StagedSum<float>);
TELEGRAD_FOR_FLOAT_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
