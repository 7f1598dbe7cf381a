#pragma once

#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/support/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// This rank's slice of the reduction of all ranks' vectors, as a sparse vector of the whole dimension: indices are those
/// of the whole vector. V is float, double, bf16 or f16. All ranks pass the same dimension and the same `slices` of it
/// (CHECKed: as many as there are ranks), and any number of entries each. Where a slice went dense on its way (see
/// switch_entries()), the elements that are not kernels::absent_element(reduction) are its entries. `how.algorithm` is
/// not looked at.
template <class V>
Task<SparseVector<V>> reduce_scatter_sparse(Transport& net, SparseVector<V> mine, Partition slices,
                                            SparseReduction how);

}  // namespace telegrad
