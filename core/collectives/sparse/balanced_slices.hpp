#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/sparse_vector.hpp"
#include "collectives/support/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

// Where to cut an index range so that every part has about as many entries, from samples of vectors' indices. Regular
// samples, as in Shi, Schaeffer, "Parallel sorting by regular sampling", Journal of Parallel and Distributed Computing
// 14(4), 1992, but weighted: vectors hold different numbers of entries.

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

/// How many of its indices each of `size` ranks shows the others.
std::size_t samples_per_rank(Rank size);

/// Slices of the index range, the same on all ranks, that hold about as many entries of all ranks' vectors: of T in all at
/// most T/P + 2·Σ ceil(k/s), with k entries and s = samples_per_rank(P) samples of each rank, and so at most 1.25·T/P + 2P
/// up to 90 ranks. Of CountedF32, whose entries are evenly spread, they are alike. All ranks pass the same dimension.
/// Uses steps beyond those of any algorithm.
template <class V>
Task<Partition> balanced_slices(Transport& net, const SparseVector<V>& mine);

}  // namespace telegrad
