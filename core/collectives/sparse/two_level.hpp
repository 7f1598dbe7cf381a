#pragma once

#include <span>

#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// The reduction of all ranks' streams, as allreduce_sparse() makes it, of ranks that live in `how.nodes` (CHECKed: two
/// levels): with k entries per rank, R ranks in a node and k' entries in the sum of one node's ranks, an owner sends and
/// receives what a sum among the nodes of k'/R entries each takes. Inside a node R owners gather the sum. `how.slices` must
/// be equal (CHECKed).
///
/// Values that are rounded on the wire are so between nodes only; inside they are sent as they are.
template <class V>
Task<SparseStream<V>> allreduce_sparse_two_level(Transport& net, SparseStream<V> mine, const SparseReduction& how);

/// The same, written into `output`, which has as many elements as the dimension. It is written only once this rank has
/// heard, directly or through others, from every other. `entries`: becomes about how many the sum has.
template <class V>
Task<void> allreduce_sparse_two_level_into(Transport& net, SparseStream<V> mine, const SparseReduction& how,
                                           std::span<V> output, double& entries);

}  // namespace telegrad
