#pragma once
// Vectors of f32 of which only counts are held: how many entries a range has, not which. A collective that is
// instantiated for CountedF32 sends messages of the lengths that real vectors would give it, in no memory to speak of.
//
// A rank's entries are of two sorts: some at indices that all ranks have in common, the rest at independent indices,
// uniform among the others. Sums hold as many entries as are to be expected then.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/types.hpp"
#include "codec/slice_reduction.hpp"
#include "codec/slices.hpp"
#include "codec/sparse_vector.hpp"
#include "codec/wire.hpp"

namespace telegrad {

/// Stands for a float that nobody holds.
struct CountedF32 {
  float value;
};
static_assert(sizeof(CountedF32) == sizeof(float));
template <>
inline constexpr DType dtype_of<CountedF32> = DType::f32;

struct EntryCounts {
  std::uint64_t common = 0;  // at indices that are the same on all ranks, evenly spread
  std::uint64_t own = 0;     // elsewhere
  std::uint64_t seed = 0;    // of the own entries' places; 0: evenly spread
};

template <>
struct SparseView<CountedF32> {
  IndexRange range;
  bool dense = false;
  EntryCounts entries;  // none where dense

  std::size_t nnz() const {
    const std::uint64_t held = dense ? range.size() : entries.common + entries.own;
    return static_cast<std::size_t>(held < range.size() ? held : range.size());
  }
  /// As for other vectors. The slices of a partition hold as many entries as the whole.
  SparseView slice(IndexRange within) const;
};

template <>
class SparseVector<CountedF32> {
 public:
  explicit SparseVector(std::uint64_t dimension = 0) : SparseVector(dimension, false, {}) {}
  /// Throws std::invalid_argument for more entries than the dimension, or a dimension beyond kDimensionMost.
  static SparseVector sparse(std::uint64_t dimension, EntryCounts entries) { return {dimension, false, entries}; }
  static SparseVector dense(std::uint64_t dimension) { return {dimension, true, {}}; }

  std::uint64_t dimension() const { return dimension_; }
  bool is_dense() const { return dense_; }
  const EntryCounts& entries() const { return entries_; }
  std::size_t nnz() const { return view().nnz(); }
  SparseView<CountedF32> view() const { return {{0, dimension_}, dense_, entries_}; }
  SparseView<CountedF32> slice(std::uint64_t begin, std::uint64_t end) const { return view().slice({begin, end}); }

 private:
  SparseVector(std::uint64_t dimension, bool dense, EntryCounts entries);

  std::uint64_t dimension_;
  bool dense_;
  EntryCounts entries_;
};

template <>
struct OwnedSlice<CountedF32> {
  IndexRange range;
  bool dense = false;
  EntryCounts entries;

  SparseView<CountedF32> view() const { return {range, dense, entries}; }
};

template <>
std::size_t bytes_of(const SparseView<CountedF32>& view);
template <>
OwnedSlice<CountedF32> dense_slice(const SparseView<CountedF32>& view, Reduction reduction);
template <>
void scale(OwnedSlice<CountedF32>& slice, double factor);
/// Common entries are taken to be the same ones in all pieces.
template <>
OwnedSlice<CountedF32> reduce_slices(std::span<const SparseView<CountedF32>> pieces, Reduction reduction, double delta);
template <>
SparseVector<CountedF32> whole_vector(OwnedSlice<CountedF32> slice, Reduction reduction, double delta);
/// Every element of a dense slice is an entry.
template <>
SparseVector<CountedF32> sparse_vector(std::uint64_t dimension, OwnedSlice<CountedF32> slice, Reduction reduction);

template <>
class SliceReduction<CountedF32> {
 public:
  SliceReduction(std::vector<SparseView<CountedF32>> pieces, Reduction reduction, double delta);

  IndexRange range() const { return pieces_[0].range; }
  std::size_t bytes() const { return bytes_in(range()); }
  std::size_t advance(std::uint64_t end);
  void remember_givers() {}
  OwnedSlice<CountedF32> finish() { return reduce_slices<CountedF32>(pieces_, reduction_, delta_); }
  Array<std::uint8_t> take_givers() { return {}; }

 private:
  std::size_t bytes_in(IndexRange part) const;

  const std::vector<SparseView<CountedF32>> pieces_;
  const Reduction reduction_;
  const double delta_;
  std::uint64_t done_;
};

/// The real message's length; packed indices are taken to be evenly spread, which random ones differ from by less than
/// 1 % where there are thousands, and packed values to be the largest of gradients: see
/// expected_header().
template <>
std::size_t encoded_size(const SparseView<CountedF32>& view, WireFormat format);
/// A message of that length, and its header; what follows in the head are the counts.
template <>
Buffer encode(const SparseView<CountedF32>& view, WireFormat format, std::span<CountedF32> error);
template <>
Decoded<CountedF32> decode(ConstBytes bytes, IndexRange expected);

}  // namespace telegrad
