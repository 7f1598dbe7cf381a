#include "codec/entry_sets.hpp"

#include <algorithm>
#include <cstring>

#include "base/check.hpp"
#include "kernels/merge.hpp"

namespace telegrad {
namespace {

template <class V>
OwnedSlice<V> room_for(const SparseView<V>& entries, std::size_t count) {
  TELEGRAD_CHECK(!entries.dense);
  return {entries.range, false, Array<std::uint32_t>(count), Array<V>(count)};
}

template <class V>
void truncate(OwnedSlice<V>& slice, std::size_t count) {
  slice.indices.truncate(count);
  slice.values.truncate(count);
}

}  // namespace

template <class V>
OwnedSlice<V> entries_without(const SparseView<V>& entries, std::span<const std::uint32_t> indices) {
  const std::size_t nnz = entries.nnz();
  OwnedSlice<V> left = room_for(entries, nnz);
  std::size_t count = 0;
  std::size_t i = 0;
  for (std::size_t j = 0; i < nnz && j < indices.size();) {  // without a branch that cannot be foreseen
    const std::uint32_t own = entries.indices[i];
    const std::uint32_t other = indices[j];
    left.indices[count] = own;
    left.values[count] = entries.values[i];
    count += own < other ? 1 : 0;
    i += own <= other ? 1 : 0;
    j += other <= own ? 1 : 0;
  }
  if (i < nnz) {
    std::memcpy(left.indices.data() + count, entries.indices.data() + i, (nnz - i) * sizeof(std::uint32_t));
    std::memcpy(left.values.data() + count, entries.values.data() + i, (nnz - i) * sizeof(V));
  }
  truncate(left, count + nnz - i);
  return left;
}

template <class V>
OwnedSlice<V> entries_within(const SparseView<V>& entries, std::span<const std::uint32_t> indices) {
  const std::size_t nnz = entries.nnz();
  OwnedSlice<V> common = room_for(entries, std::min(nnz, indices.size()));
  std::size_t count = 0;
  std::size_t i = 0;
  for (std::size_t j = 0; i < nnz && j < indices.size();) {
    const std::uint32_t own = entries.indices[i];
    const std::uint32_t other = indices[j];
    common.indices[count] = own;
    common.values[count] = entries.values[i];
    count += own == other ? 1 : 0;
    i += own <= other ? 1 : 0;
    j += other <= own ? 1 : 0;
  }
  truncate(common, count);
  return common;
}

template <class V>
OwnedSlice<V> sum_of_entries(const SparseView<V>& a, const SparseView<V>& b) {
  TELEGRAD_CHECK(a.range == b.range && !b.dense);
  OwnedSlice<V> sum = room_for(a, a.nnz() + b.nnz());
  const kernels::EntriesOut<V> out{sum.indices.span(), sum.values.span()};
  truncate(sum, kernels::merge(Reduction::sum, a.entries(), b.entries(), out));
  return sum;
}

#define TELEGRAD_INSTANTIATE(V)                                                                      \
  template OwnedSlice<V> entries_without(const SparseView<V>&, std::span<const std::uint32_t>);      \
  template OwnedSlice<V> entries_within(const SparseView<V>&, std::span<const std::uint32_t>);       \
  template OwnedSlice<V> sum_of_entries(const SparseView<V>&, const SparseView<V>&);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
