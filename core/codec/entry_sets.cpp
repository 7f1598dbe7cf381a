#include "codec/entry_sets.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.hpp"
#include "kernels/merge.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kMapBits = 64;  // of a word

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

// Merging costs a wrongly foreseen branch, or a load that waits for the last one, for each entry. A map of bits has neither,
// and weighs no more than the entries do, from one in 64 on.
template <class V>
OwnedSlice<V> entries_without(const SparseView<V>& entries, std::span<const std::uint32_t> indices) {
  const std::size_t nnz = entries.nnz();
  OwnedSlice<V> left = room_for(entries, nnz);
  const std::size_t begin = entries.range.begin;
  const std::size_t length = entries.range.size();
  const auto first = std::ranges::lower_bound(indices, begin);
  indices = {first, std::lower_bound(first, indices.end(), begin + length)};
  const std::uint32_t* const own = entries.indices.data();
  const V* const values = entries.values.data();
  std::uint32_t* const left_indices = left.indices.data();
  V* const left_values = left.values.data();
  std::size_t count = 0;
  if (length / kMapBits <= nnz + indices.size()) {
    std::vector<std::uint64_t> map(length / kMapBits + 1);  // room for one bit more, which stays 0
    for (const std::uint32_t index : indices) map[(index - begin) / kMapBits] |= std::uint64_t{1} << (index - begin) % kMapBits;
    for (std::size_t i = 0; i < nnz; ++i) {
      const std::uint32_t index = own[i];  // once: its owner may change it meanwhile
      const std::size_t place = std::min<std::size_t>(index - begin, length);
      left_indices[count] = index;
      left_values[count] = values[i];
      count += 1 - (map[place / kMapBits] >> place % kMapBits & 1);
    }
    truncate(left, count);
    return left;
  }
  std::size_t i = 0;
  for (std::size_t j = 0; i < nnz && j < indices.size();) {
    const std::uint32_t index = own[i];
    const std::uint32_t other = indices[j];
    left_indices[count] = index;
    left_values[count] = values[i];
    count += index < other ? 1 : 0;
    i += index <= other ? 1 : 0;
    j += other <= index ? 1 : 0;
  }
  if (i < nnz) {
    std::memcpy(left_indices + count, own + i, (nnz - i) * sizeof(std::uint32_t));
    std::memcpy(left_values + count, values + i, (nnz - i) * sizeof(V));
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
