#pragma once

#include "base/types.hpp"
#include "collectives/sparse_messages.hpp"
#include "sparse/slices.hpp"
#include "sparse/stream.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// This rank's slice of the sum (or mean) of all ranks' streams, of `slices` of their index range, the same on all ranks.
/// Every rank sends every other its entries there: with k entries per rank, spread evenly over the slices, k(P−1)/P each way. Dense where that is shorter on the wire (see
/// switch_entries()). Its entries are added in the order of ranks. Uses steps [0, split_steps()).
template <class V>
Task<OwnedSlice<V>> reduce_owned_slice(Transport& net, const SparseStream<V>& mine, const Partition& slices,
                                       const SparseReduction& how);

template <class V>
Step split_steps(const Transport& net, const Partition& slices);

}  // namespace telegrad
