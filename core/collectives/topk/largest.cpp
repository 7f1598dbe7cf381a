#include "collectives/topk/largest.hpp"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "kernels/cut.hpp"

namespace telegrad {
namespace {

// Every key above `key` is among the k largest, and the first `ties` of those that equal it.
struct KeyCut {
  std::uint64_t key;
  std::size_t ties;
};

// 1 <= k <= values.size()
template <class V>
KeyCut cut_of(std::span<const V> values, std::size_t k) {
  if constexpr (sizeof(V) <= sizeof(std::int32_t)) {
    std::vector<std::int32_t> keys;
    keys.reserve(values.size());
    for (const V value : values) keys.push_back(static_cast<std::int32_t>(magnitude_key(value)));
    const kernels::Cut cut = kernels::topk_cut(std::span(keys), k, kernels::Side::both);
    return {static_cast<std::uint64_t>(cut.key), cut.ties};
  } else {
    std::vector<std::uint64_t> keys;
    keys.reserve(values.size());
    for (const V value : values) keys.push_back(magnitude_key(value));
    const auto wanted = keys.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::ranges::nth_element(keys, wanted, std::greater<>());
    const std::uint64_t key = *wanted;
    const auto above = std::count_if(keys.begin(), wanted, [key](std::uint64_t one) { return one > key; });
    return {key, k - static_cast<std::size_t>(above)};
  }
}

}  // namespace

template <class V>
PartedEntries<V> take_largest(const SparseView<V>& entries, std::uint64_t k) {
  TELEGRAD_CHECK(!entries.dense);
  const std::size_t nnz = entries.nnz();
  const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(k, nnz));
  OwnedSlice<V> taken{entries.range, false, Array<std::uint32_t>(count), Array<V>(count)};
  OwnedSlice<V> rest{entries.range, false, Array<std::uint32_t>(nnz - count), Array<V>(nnz - count)};
  if (count == 0 || count == nnz) {
    OwnedSlice<V>& all = count == 0 ? rest : taken;
    std::ranges::copy(entries.indices, all.indices.begin());
    std::ranges::copy(entries.values, all.values.begin());
    return {std::move(taken), std::move(rest)};
  }
  KeyCut cut = cut_of(entries.values, count);
  std::size_t next = 0;
  for (std::size_t i = 0; i < nnz; ++i) {
    const std::uint64_t key = magnitude_key(entries.values[i]);
    const bool ties = key == cut.key && cut.ties > 0;
    cut.ties -= ties ? 1 : 0;
    const bool is_taken = key > cut.key || ties;
    const OwnedSlice<V>& to = is_taken ? taken : rest;
    const std::size_t place = is_taken ? next : i - next;
    to.indices[place] = entries.indices[i];
    to.values[place] = entries.values[i];
    next += is_taken ? 1 : 0;
  }
  return {std::move(taken), std::move(rest)};
}

#define TELEGRAD_INSTANTIATE(V) template PartedEntries<V> take_largest(const SparseView<V>&, std::uint64_t);
TELEGRAD_FOR_FLOAT_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
