#pragma once
// A vector put together from slices that come in any order: each is decoded where it belongs. That takes knowing how many
// entries each holds before the first one is decoded.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "codec/counted.hpp"
#include "codec/known_values.hpp"
#include "codec/sparse_vector.hpp"

namespace telegrad {

/// What a slice is said to hold.
struct SliceContent {
  IndexRange range;
  bool dense = false;
  std::uint64_t nnz = 0;  // range.size() where dense
};

/// Of entries in a vector; `indices` is empty where they have none.
template <class V>
struct SlicePlace {
  std::span<std::uint32_t> indices;
  std::span<V> values;
};

template <class V>
class VectorAssembly {
 public:
  /// Of slices in ascending order that cover [0, n), at least one (CHECKed). Dense where one of them is, or where together
  /// they hold more than `delta` entries, with kernels::absent_element(reduction) where there is no entry.
  VectorAssembly(std::vector<SliceContent> slices, Reduction reduction, double delta);

  /// Decodes the slice's message, of either sort (see known_values.hpp). Returns what is wrong with it, or nothing. Once for
  /// each slice.
  std::string place(std::size_t slice, ConstBytes message, const GivenEntries<V>& given = GivenEntries<V>::none());
  /// The same of one that is decoded and checked, and holds what was said (CHECKed).
  void place(std::size_t slice, const SparseView<V>& view);
  /// Where the slice's arrays belong as they are: whoever puts them there, and checks them, does not place it. None where
  /// the slice is sparse and the whole is not.
  std::optional<SlicePlace<V>> place_of(std::size_t slice);
  /// Once all slices have been placed.
  SparseVector<V> finish();

 private:
  std::vector<SliceContent> slices_;
  Reduction reduction_;
  bool dense_ = false;
  std::vector<std::size_t> first_;  // entry of each slice
  Array<std::uint32_t> indices_;
  Array<V> values_;
};

template <>
class VectorAssembly<CountedF32> {
 public:
  VectorAssembly(std::vector<SliceContent> slices, Reduction reduction, double delta);

  std::string place(std::size_t slice, ConstBytes message,
                    const GivenEntries<CountedF32>& given = GivenEntries<CountedF32>::none());
  void place(std::size_t slice, const SparseView<CountedF32>& view);
  SparseVector<CountedF32> finish();

 private:
  std::vector<SliceContent> slices_;
  bool dense_ = false;
  EntryCounts entries_;
};

}  // namespace telegrad
