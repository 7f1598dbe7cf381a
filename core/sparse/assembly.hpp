#pragma once
// A stream put together from slices that come in any order: each is decoded where it belongs. That takes knowing how many
// entries each holds before the first one is decoded.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "sparse/counted.hpp"
#include "sparse/stream.hpp"

namespace telegrad {

/// What a slice is said to hold.
struct SliceContent {
  IndexRange range;
  bool dense = false;
  std::uint64_t nnz = 0;  // range.size() where dense
};

template <class V>
class StreamAssembly {
 public:
  /// Of slices in ascending order that cover [0, n), at least one (CHECKed). Dense where one of them is, or where together
  /// they hold more than `delta` entries, with kernels::absent_element(reduction) where there is no entry.
  StreamAssembly(std::vector<SliceContent> slices, Reduction reduction, double delta);

  /// Decodes the slice's message. Returns what is wrong with it, or nothing. Once for each slice.
  std::string place(std::size_t slice, ConstBytes message);
  /// Once all slices have been placed.
  SparseStream<V> finish();

 private:
  std::vector<SliceContent> slices_;
  Reduction reduction_;
  bool dense_ = false;
  std::vector<std::size_t> first_;  // entry of each slice
  Array<std::uint32_t> indices_;
  Array<V> values_;
};

template <>
class StreamAssembly<CountedF32> {
 public:
  StreamAssembly(std::vector<SliceContent> slices, Reduction reduction, double delta);

  std::string place(std::size_t slice, ConstBytes message);
  SparseStream<CountedF32> finish();

 private:
  std::vector<SliceContent> slices_;
  bool dense_ = false;
  EntryCounts entries_;
};

}  // namespace telegrad
