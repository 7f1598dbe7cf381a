#pragma once

#include "base/types.hpp"
#include "codec/slices.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// As reduce_owned_slice(), but the sum of a slice travels round a ring, to the right, and every rank adds its entries: a
/// baseline, which sends each entry up to P − 1 times. Uses steps [0, ring_steps()).
template <class V>
Task<OwnedSlice<V>> ring_owned_slice(Transport& net, const SparseVector<V>& mine, const Partition& slices,
                                     const SparseReduction& how);

template <class V>
Step ring_steps(const Transport& net, const Partition& slices);

}  // namespace telegrad
