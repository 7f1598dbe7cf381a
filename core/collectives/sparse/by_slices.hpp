#pragma once

#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/sparse/output.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// The reduction of all ranks' vectors over slices of the index range, one for each rank, as `how.algorithm` reduces them
/// (split_allgather, split_dense_allgather, ring; automatic: a ring between two hosts, else the split) and `how.slices` cuts
/// them. Balanced slices stay sparse: where entries cluster they are narrow and full, and one of them must not make the whole sum
/// dense. Out: SparseOutput or DenseOutput.
template <class V, template <class> class Out>
Task<void> allreduce_by_slices(Transport& net, SparseVector<V> mine, const SparseReduction& how, Out<V>& out);

}  // namespace telegrad
