#pragma once

#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/sparse/output.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// The reduction of all ranks' vectors, as allreduce_sparse() makes it, of ranks that live in `how.nodes` (CHECKed: two
/// levels): with k entries per rank, R ranks in a node and k' entries in the sum of one node's ranks, an owner sends and
/// receives what a sum among the nodes of k'/R entries each takes. Inside a node R owners gather the sum. `how.slices` must
/// be equal (CHECKed).
///
/// Values that are rounded on the wire are so between nodes only; inside they are sent as they are.
/// Out: SparseOutput or DenseOutput.
template <class V, template <class> class Out>
Task<void> allreduce_sparse_two_level(Transport& net, SparseVector<V> mine, const SparseReduction& how, Out<V>& out);

}  // namespace telegrad
