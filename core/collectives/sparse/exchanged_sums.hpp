#pragma once
// The second half of a sparse allreduce over owned slices, between hosts and among few ranks: every owner reduces its slice
// part by part, and sends each part's sum to every other rank, round by round. While a round's messages travel, the next one's is
// made, what has come is taken, and the parts behind are reduced: so links rest no longer than the first part takes. Whoever has
// given entries of a slice is sent no values that are in the sum as they were (codec/known_values.hpp).

#include "base/types.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/sparse/output.hpp"
#include "collectives/sparse/split.hpp"
#include "collectives/support/partition.hpp"
#include "transport/task.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Whether sums of shares go so, and not as allgather_slices() has them; the same on all ranks.
template <class V>
bool exchanges_sums(const Transport& net, const Partition& slices, const SparseReduction& how);

/// What all ranks gave, summed to where `whole` puts it (an AssembledSum or a WrittenSum). `mine`: this rank's entries, of all
/// slices; `given`: everybody's of this rank's. Uses steps from `first_step` on.
template <class V, class To>
Task<void> exchange_sums(Transport& net, SparseVector<V> mine, GivenShares<V> given, const Partition& slices,
                         const SparseReduction& how, Step first_step, To& whole);

}  // namespace telegrad
