#pragma once
// Where to cut an index range so that every part has about as many entries, from samples of vectors' indices. Regular
// samples, as in Shi, Schaeffer, "Parallel sorting by regular sampling", Journal of Parallel and Distributed Computing
// 14(4), 1992, but weighted: vectors hold different numbers of entries.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/sparse_vector.hpp"

namespace telegrad {

/// Of a vector's k entries, in order, the ones at floor(i·k/s) for i < s: sample i stands for the entries up to sample
/// i + 1.
struct IndexSamples {
  std::uint64_t entries = 0;               // k
  std::span<const std::uint32_t> indices;  // s of them, at least 1; of no meaning if k is 0
};

/// The samples of a view, as many as `into` has elements.
template <class V>
void sample_indices(const SparseView<V>& view, std::span<std::uint32_t> into);

/// Why these cannot be samples of a vector of `dimension` elements; empty if they can.
const char* fault_of(const IndexSamples& samples, std::uint64_t dimension);

/// Lengths of `parts` consecutive ranges of [0, dimension) that hold about as many entries of all vectors together: of T
/// entries none has more than T / parts + 2·Σ ceil(k/s). Equal lengths, but for one, where there is no entry. Samples
/// must be without fault (CHECKed: none is beyond the dimension).
std::vector<std::uint64_t> balanced_lengths(std::uint64_t dimension, std::size_t parts,
                                            std::span<const IndexSamples> vectors);

}  // namespace telegrad
