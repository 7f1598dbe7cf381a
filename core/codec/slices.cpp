#include "codec/slices.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "base/copy.hpp"
#include "kernels/merge.hpp"
#include "kernels/operations.hpp"
#include "kernels/reduce.hpp"
#include "kernels/scale.hpp"
#include "kernels/scatter.hpp"

namespace telegrad {
namespace {

template <class V>
OwnedSlice<V> reduce_sparse(std::span<const SparseView<V>> pieces, Reduction reduction) {
  std::vector<kernels::Entries<V>> runs;
  std::size_t total = 0;
  for (const SparseView<V>& piece : pieces) {
    runs.push_back(piece.entries());
    total += piece.nnz();
  }
  OwnedSlice<V> sum{pieces[0].range, false, Array<std::uint32_t>(total), Array<V>(total)};
  const std::size_t count =
      kernels::reduce_sorted<V>(reduction, runs, kernels::EntriesOut<V>{sum.indices.span(), sum.values.span()});
  sum.indices.truncate(count);
  sum.values.truncate(count);
  return sum;
}

template <class T>
T* append(T* to, std::span<const T> from) {
  copy_bytes(to, from.data(), from.size_bytes());
  return to + from.size();
}

}  // namespace

template <class V>
OwnedSlice<V> dense_slice(const SparseView<V>& view, Reduction reduction) {
  OwnedSlice<V> dense{view.range, true, {}, Array<V>(static_cast<std::size_t>(view.range.size()))};
  write_dense(view, dense.values.span(), reduction);
  return dense;
}

// A sparse piece is never just set, and of a sparse and a dense one the dense one is added to: so -0 beside an element
// that is absent from the other piece becomes the same in either order.
template <class V>
void reduce_densely(std::span<const SparseView<V>> pieces, Reduction reduction, std::span<V> out) {
  const std::size_t base = pieces.size() > 1 && pieces[1].dense && !pieces[0].dense ? 1 : 0;
  if (pieces[base].dense) {
    std::ranges::copy(pieces[base].values, out.begin());
  } else {
    kernels::fill(out, kernels::absent_element<V>(reduction));
  }
  const Bytes values = std::as_writable_bytes(out);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const SparseView<V>& piece = pieces[i];
    if (!piece.dense) {
      kernels::scatter_reduce(reduction, out, piece.entries(), piece.range.begin);
    } else if (i != base) {
      kernels::reduce_to(dtype_of<V>, reduction, values, std::as_bytes(piece.values), values);
    }
  }
}

template <class V>
void scale(OwnedSlice<V>& slice, double factor) {
  kernels::scale(dtype_of<V>, std::as_writable_bytes(slice.values.span()), factor);
}

template <class V>
OwnedSlice<V> reduce_slices(std::span<const SparseView<V>> pieces, Reduction reduction, double delta) {
  TELEGRAD_CHECK(!pieces.empty());
  bool dense = false;
  for (const SparseView<V>& piece : pieces) {
    TELEGRAD_CHECK(piece.range == pieces[0].range);
    dense = dense || piece.dense || static_cast<double>(piece.nnz()) > delta;
  }
  if (dense) {
    OwnedSlice<V> sum{pieces[0].range, true, {}, Array<V>(static_cast<std::size_t>(pieces[0].range.size()))};
    reduce_densely(pieces, reduction, sum.values.span());
    return sum;
  }
  OwnedSlice<V> sum = reduce_sparse(pieces, reduction);
  if (static_cast<double>(sum.values.size()) <= delta) return sum;
  return dense_slice(sum.view(), reduction);
}

template <class V>
OwnedSlice<V> concatenate_slices(std::span<const SparseView<V>> slices) {
  TELEGRAD_CHECK(!slices.empty());
  OwnedSlice<V> whole{{slices.front().range.begin, slices.front().range.begin}, false, {}, {}};
  std::size_t total = 0;
  for (const SparseView<V>& slice : slices) {
    TELEGRAD_CHECK(!slice.dense && slice.range.begin == whole.range.end && slice.range.end >= whole.range.end);
    whole.range.end = slice.range.end;
    total += slice.nnz();
  }
  whole.indices = Array<std::uint32_t>(total);
  whole.values = Array<V>(total);
  std::uint32_t* next_index = whole.indices.data();
  V* next_value = whole.values.data();
  for (const SparseView<V>& slice : slices) {
    next_index = append(next_index, slice.indices);
    next_value = append(next_value, slice.values);
  }
  return whole;
}

template <class V>
SparseVector<V> whole_vector(OwnedSlice<V> slice, Reduction reduction, double delta) {
  TELEGRAD_CHECK(slice.range.begin == 0);
  if (!slice.dense && static_cast<double>(slice.indices.size()) > delta) slice = dense_slice(slice.view(), reduction);
  if (slice.dense) return SparseVector<V>::adopt_dense(std::move(slice.values));
  return SparseVector<V>::adopt_sparse(slice.range.end, std::move(slice.indices), std::move(slice.values));
}

template <class V>
SparseVector<V> sparse_vector(std::uint64_t dimension, OwnedSlice<V> slice, Reduction reduction) {
  TELEGRAD_CHECK(slice.range.end <= dimension);
  if (slice.dense) {
    const std::span<const V> dense = slice.values.span();
    const V absent = kernels::absent_element<V>(reduction);
    const auto base = static_cast<std::uint32_t>(slice.range.begin);
    const std::size_t count = kernels::compact<V>(dense, absent, base, {});
    Array<std::uint32_t> indices(count);
    Array<V> values(count);
    kernels::compact<V>(dense, absent, base, {indices.span(), values.span()});
    return SparseVector<V>::adopt_sparse(dimension, std::move(indices), std::move(values));
  }
  return SparseVector<V>::adopt_sparse(dimension, std::move(slice.indices), std::move(slice.values));
}

#define TELEGRAD_INSTANTIATE(V)                                                                  \
  template OwnedSlice<V> dense_slice(const SparseView<V>&, Reduction);                           \
  template void reduce_densely(std::span<const SparseView<V>>, Reduction, std::span<V>);         \
  template void scale(OwnedSlice<V>&, double);                                                   \
  template OwnedSlice<V> reduce_slices(std::span<const SparseView<V>>, Reduction, double);       \
  template OwnedSlice<V> concatenate_slices(std::span<const SparseView<V>>);                     \
  template SparseVector<V> whole_vector(OwnedSlice<V>, Reduction, double);                       \
  template SparseVector<V> sparse_vector(std::uint64_t, OwnedSlice<V>, Reduction);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
