#pragma once
// Sorted entries as sets of indices. Views must be sparse (CHECKed); V is float, double, bf16 or f16.

#include <cstdint>
#include <span>

#include "codec/slices.hpp"
#include "codec/sparse_vector.hpp"

namespace telegrad {

/// The entries at other indices than those, which ascend.
template <class V>
OwnedSlice<V> entries_without(const SparseView<V>& entries, std::span<const std::uint32_t> indices);

/// The entries at those indices, which ascend.
template <class V>
OwnedSlice<V> entries_within(const SparseView<V>& entries, std::span<const std::uint32_t> indices);

/// What one of them has, and the sums a + b where both have an entry. Of one range (CHECKed).
template <class V>
OwnedSlice<V> sum_of_entries(const SparseView<V>& a, const SparseView<V>& b);

}  // namespace telegrad
