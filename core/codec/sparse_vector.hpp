#pragma once
// Sparse vectors (SparCML §5.1): a vector held as sorted entries or, where those would take more bytes, densely.
// V is float, double, bf16 or f16. An absent entry is the neutral element of the reduction that the vector is meant for:
// zero for sums, infinity for a minimum. A vector does not know that reduction: who makes it dense says it.
// Nothing here knows of ranks or of a wire.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "kernels/entries.hpp"

namespace telegrad {

inline constexpr std::uint64_t kDimensionMost = 0xffffffffU;  // indices are 32 bits

/// The indices begin <= i < end.
struct IndexRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  std::uint64_t size() const { return end - begin; }
  friend bool operator==(const IndexRange&, const IndexRange&) = default;
};

/// A vector, or a slice of one, that somebody else owns.
template <class V>
struct SparseView {
  IndexRange range;
  bool dense = false;
  std::span<const std::uint32_t> indices;  // strictly increasing, in the range, counted from the whole vector's start
  std::span<const V> values;               // one per index, or range.size() where dense
  std::span<const std::uint64_t> marks = {};  // of the indices (kernels/marks.hpp), where somebody has made them

  /// Entries held: range.size() where dense.
  std::size_t nnz() const { return values.size(); }
  kernels::Entries<V> entries() const { return {indices, values}; }
  /// The part in `within`, which must lie in this range (CHECKed). O(log nnz).
  SparseView slice(IndexRange within) const;
};

/// Marks a block of a whole vector's entries, of which the first `before` lie before it, and says how many are marked. Each index is
/// read once, as its owner may change it meanwhile, and none where the view has marks. Nothing, unless those indices are
/// strictly increasing and in the block, or where there are fewer entries than marks. `marks` has as many words as the block
/// needs (CHECKed).
template <class V>
std::optional<std::size_t> mark_block(const SparseView<V>& view, IndexRange block, std::size_t before,
                                      std::span<std::uint64_t> marks);

/// Throws std::invalid_argument, naming what is wrong, unless the indices are strictly increasing and below the
/// dimension, there are as many values, and the dimension is at most kDimensionMost.
void validate_entries(std::uint64_t dimension, std::span<const std::uint32_t> indices, std::size_t values);

/// out[i - range.begin] = view[i] * factor, and kernels::absent_element(reduction) where there is no entry. `out` has
/// range.size() elements (CHECKed).
template <class V>
void write_dense(const SparseView<V>& view, std::span<V> out, Reduction reduction = Reduction::sum,
                 double factor = 1.0);

template <class V>
class SparseVector {
 public:
  /// No entries. Throws std::invalid_argument for a dimension beyond kDimensionMost.
  explicit SparseVector(std::uint64_t dimension = 0);

  /// Copies and validates, as validate_entries does.
  static SparseVector sparse(std::uint64_t dimension, std::span<const std::uint32_t> indices,
                             std::span<const V> values);
  /// Copies. Throws std::invalid_argument beyond kDimensionMost values.
  static SparseVector dense(std::span<const V> values);
  /// Dense, without a copy until something is to change it: `values` must outlive the vector and stay as they are.
  static SparseVector borrow_dense(std::span<const V> values);
  /// Entries as somebody claims them: nobody has checked the indices, which may change, nor that `marks`, if any, are theirs. For
  /// whoever checks what it reads.
  static SparseVector borrow_sparse(std::uint64_t dimension, std::span<const std::uint32_t> indices,
                                    std::span<const V> values, std::span<const std::uint64_t> marks = {});
  /// Take arrays that the caller has built in order: only lengths and the ends are CHECKed.
  static SparseVector adopt_sparse(std::uint64_t dimension, Array<std::uint32_t> indices, Array<V> values);
  static SparseVector adopt_dense(Array<V> values);

  SparseVector clone() const;

  std::uint64_t dimension() const { return dimension_; }
  bool is_dense() const { return dense_; }
  /// Entries held: the dimension where dense.
  std::size_t nnz() const { return values().size(); }
  bool is_borrowed() const { return !borrowed_.empty(); }
  std::span<const std::uint32_t> indices() const { return is_borrowed() ? borrowed_indices_ : indices_.span(); }
  std::span<const V> values() const { return is_borrowed() ? borrowed_ : values_.span(); }
  /// To be changed: what was borrowed, densely (CHECKed), is copied.
  std::span<V> own_values();

  /// Valid until the vector is changed, moved from or destroyed.
  SparseView<V> view() const { return {{0, dimension_}, dense_, indices(), values(), borrowed_marks_}; }
  SparseView<V> slice(std::uint64_t begin, std::uint64_t end) const { return view().slice({begin, end}); }

  /// Becomes dense, in place, with kernels::absent_element(reduction) where there is no entry. -0 becomes +0 in sums
  /// and for max_abs.
  void to_dense(Reduction reduction = Reduction::sum);
  /// out = this * factor. Throws std::invalid_argument unless out.size() == dimension().
  void write_dense(std::span<V> out, Reduction reduction = Reduction::sum, double factor = 1.0) const;
  /// Multiplies every value; keeps the indices.
  void scale(double factor);

  /// Give the arrays away; the vector may then only be assigned to or destroyed.
  Array<std::uint32_t> take_indices() { return std::move(indices_); }
  Array<V> take_values() {
    own_values();
    return std::move(values_);
  }

 private:
  std::uint64_t dimension_ = 0;
  bool dense_ = false;
  Array<std::uint32_t> indices_;
  Array<V> values_;
  std::span<const V> borrowed_;  // in place of values_
  std::span<const std::uint32_t> borrowed_indices_;  // in place of indices_, where that is sparse
  std::span<const std::uint64_t> borrowed_marks_;    // of these
};

/// The number of entries δ beyond which a vector of `n` elements is better dense: factor * n * v / (c + v), with v
/// bytes per value and c per index. Throws std::invalid_argument for a negative or NaN factor.
double switch_entries(std::uint64_t n, std::size_t value_bytes, std::size_t index_bytes, double factor = 1.0);

/// a ∘ b; the sum for an average. Dense where either is, or where both together hold more than `delta` entries; else
/// disjoint ranges are concatenated and others merged. reduce(a, b) and reduce(b, a) have equal bits. What is dense
/// holds kernels::absent_element(reduction) where there is no entry, also what is passed in.
/// Throws std::invalid_argument for unequal dimensions.
template <class V>
SparseVector<V> reduce(SparseVector<V> a, SparseVector<V> b, Reduction reduction, double delta);

}  // namespace telegrad
