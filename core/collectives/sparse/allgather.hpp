#pragma once

#include <vector>

#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Every rank's vector, in the order of ranks, the same bits on every rank; V is float, double, bf16 or f16. All ranks
/// pass the same dimension, and any number of entries each, which stay what they are: sparse ones do not go dense, and a
/// zero stays an entry. Of `how` only `wire` and `residual` are looked at; values that are rounded on the wire are
/// rounded in this rank's own vector too.
template <class V>
Task<std::vector<SparseVector<V>>> allgather_sparse(Transport& net, SparseVector<V> mine, SparseReduction how);

}  // namespace telegrad
