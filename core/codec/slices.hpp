#pragma once
// Slices of one vector's index range: adding up everybody's piece of one range, and joining ranges.

#include <span>

#include "base/buffer.hpp"
#include "codec/sparse_vector.hpp"

namespace telegrad {

/// A piece of a vector that owns its arrays.
template <class V>
struct OwnedSlice {
  IndexRange range;
  bool dense = false;
  Array<std::uint32_t> indices;
  Array<V> values;

  /// Valid until the arrays change or go; moving the slice keeps it valid.
  SparseView<V> view() const { return {range, dense, indices.span(), values.span()}; }
};

/// What a view's arrays take in memory.
template <class V>
std::size_t bytes_of(const SparseView<V>& view) {
  return view.indices.size_bytes() + view.values.size_bytes();
}

/// The same vector, densely, with kernels::absent_element(reduction) where there is no entry.
template <class V>
OwnedSlice<V> dense_slice(const SparseView<V>& view, Reduction reduction);

/// out = the reduction of pieces of one and the same range, at least one, formed in the order given; of two pieces the same
/// bits in either order.
template <class V>
void reduce_densely(std::span<const SparseView<V>> pieces, Reduction reduction, std::span<V> out);

/// Multiplies every value; keeps the indices.
template <class V>
void scale(OwnedSlice<V>& slice, double factor);

/// The reduction (the sum for an average) of pieces of one and the same range (CHECKed; at least one), formed in the
/// order given, so that the result depends on that order alone, and with two pieces not on it either. Dense where a piece is, or where the result has more
/// than `delta` entries (a number for this range, not for the whole vector); else sparse. An index that a piece holds stays, also where the sum is zero.
template <class V>
OwnedSlice<V> reduce_slices(std::span<const SparseView<V>> pieces, Reduction reduction, double delta);

/// Sparse slices in ascending order without gap or overlap (CHECKed; at least one) as one.
template <class V>
OwnedSlice<V> concatenate_slices(std::span<const SparseView<V>> slices);

/// A slice of all indices (CHECKed) as a vector: dense where it is, or has more than `delta` entries.
template <class V>
SparseVector<V> whole_vector(OwnedSlice<V> slice, Reduction reduction, double delta);

/// A sparse vector of `dimension` elements (at least range.end, CHECKed) with the slice's entries; of a dense one with the
/// elements that are not kernels::absent_element(reduction).
template <class V>
SparseVector<V> sparse_vector(std::uint64_t dimension, OwnedSlice<V> slice, Reduction reduction);

}  // namespace telegrad
