#pragma once
// reduce_slices() in parts of the range, so that whoever reduces can do something else between: every part is written where
// it belongs, and none is copied behind the others.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.hpp"
#include "kernels/entries.hpp"
#include "sparse/slices.hpp"
#include "sparse/stream.hpp"

namespace telegrad {

template <class V>
class SliceReduction {
 public:
  /// Arguments as reduce_slices() has them; the pieces' arrays must stay as they are until finish().
  SliceReduction(std::vector<StreamView<V>> pieces, Reduction reduction, double delta);

  IndexRange range() const { return pieces_[0].range; }
  /// What all pieces' arrays take in memory.
  std::size_t bytes() const;
  /// Reduces what follows the parts before, up to `end` (in the range, not below the last one: CHECKed). Returns about how
  /// many bytes it has read.
  std::size_t advance(std::uint64_t end);
  /// Once all of the range is reduced (CHECKed): the bits of reduce_slices().
  OwnedSlice<V> finish();

 private:
  void reduce_sparsely(const std::vector<StreamView<V>>& parts);

  const std::vector<StreamView<V>> pieces_;
  const Reduction reduction_;
  const double delta_;
  std::uint64_t done_ = 0;  // indices below are reduced
  std::size_t count_ = 0;  // entries written, unless dense
  OwnedSlice<V> sum_;
};

}  // namespace telegrad
