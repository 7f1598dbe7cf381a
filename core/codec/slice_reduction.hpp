#pragma once
// reduce_slices() in parts of the range, so that whoever reduces can do something else between: every part is written where
// it belongs, and none is copied behind the others.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "codec/slices.hpp"
#include "codec/sparse_vector.hpp"
#include "kernels/entries.hpp"

namespace telegrad {

template <class V>
class SliceReduction {
 public:
  /// Arguments as reduce_slices() has them; the pieces' arrays must stay as they are until finish().
  SliceReduction(std::vector<SparseView<V>> pieces, Reduction reduction, double delta);
  /// Unless that takes more time than it saves, and before anything is reduced: says in the end which pieces have each index.
  void remember_givers();

  IndexRange range() const { return pieces_[0].range; }
  /// What all pieces' arrays take in memory.
  std::size_t bytes() const;
  /// Reduces what follows the parts before, up to `end` (in the range, not below the last one: CHECKed). Returns about how
  /// many bytes it has read.
  std::size_t advance(std::uint64_t end);
  /// Once all of the range is reduced (CHECKed): the bits of reduce_slices().
  OwnedSlice<V> finish();
  /// What remember_givers() asked for, as kernels::reduce_sorted_of() has it; none where that does not pay, or it is dense. Once,
  /// after finish().
  Array<std::uint8_t> take_givers() { return std::move(givers_); }

 private:
  void reduce_sparsely(const std::vector<SparseView<V>>& parts);

  const std::vector<SparseView<V>> pieces_;
  const Reduction reduction_;
  const double delta_;
  std::uint64_t done_ = 0;  // indices below are reduced
  std::size_t count_ = 0;  // entries written, unless dense
  OwnedSlice<V> sum_;
  Array<std::uint8_t> givers_;
};

}  // namespace telegrad
