#pragma once

#include <cstddef>

#include "codec/sparse_vector.hpp"
#include "collectives/support/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// How many of its indices each of `size` ranks shows the others.
std::size_t samples_per_rank(Rank size);

/// Slices of the index range, the same on all ranks, that hold about as many entries of all ranks' vectors: of T in all at
/// most T/P + 2·Σ ceil(k/s), with k entries and s = samples_per_rank(P) samples of each rank, and so at most 1.25·T/P + 2P
/// up to 90 ranks. Of CountedF32, whose entries are evenly spread, they are alike. All ranks pass the same dimension.
/// Uses steps beyond those of any algorithm.
template <class V>
Task<Partition> balanced_slices(Transport& net, const SparseVector<V>& mine);

}  // namespace telegrad
