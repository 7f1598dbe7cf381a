#pragma once

#include "base/types.hpp"
#include "collectives/sparse_messages.hpp"
#include "sparse/slices.hpp"
#include "sparse/stream.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// The reduction of all ranks' streams by recursive doubling, the same bits on every rank; as a slice of the whole range.
template <class V>
Task<OwnedSlice<V>> allreduce_sparse_doubling(Transport& net, SparseStream<V> mine, const SparseReduction& how);

}  // namespace telegrad
