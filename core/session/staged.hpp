#pragma once
// Entries that a stream of a device puts into host memory, and the sum that it takes from there. How many they are is in
// that memory too: nobody on the host knows it before the gate of the operation is open. What a stream is, this must not
// know.

#include <cstdint>
#include <span>

#include "collectives/sparse/messages.hpp"
#include "collectives/support/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// The memory is the caller's, as a Gate's is.
template <class V>
struct StagedEntries {
  std::uint64_t dimension = 0;
  const std::int64_t* count = nullptr;
  std::span<const std::uint32_t> indices;  // as many as there is room for
  std::span<const V> values;
};

/// In place of a number of entries: the sum is dense. -1 is what a failure makes of the word (Gate::spoil).
inline constexpr std::int64_t kDenseForm = -2;

template <class V>
struct StagedSum {
  std::int64_t* form = nullptr;      // what a sum leaves here: how many entries it has, or kDenseForm; null: none is wanted
  std::span<std::uint32_t> indices;  // of more entries than these the sum becomes dense
  std::span<V> values;
  std::span<V> dense;  // as many as the dimension; may be the memory of the other two
};

/// What is staged when this begins, as entries. Throws std::invalid_argument where that is no vector.
template <class V>
Task<SparseVector<V>> read_staged(Transport& net, StagedEntries<V> mine);

/// To where a stream takes the sum.
template <class V>
Task<void> write_staged(Transport& net, const SparseVector<V>& sum, StagedSum<V> out, Reduction reduction);

/// What a sum loses on this rank, of which none may be wanted: at first zeros.
Task<void> clear_lost(Transport& net, StagedSum<float> lost);
/// And at last, with the finite values of `left`, to where a stream takes it.
template <class V>
Task<void> write_lost(Transport& net, const SparseVector<V>& left, StagedSum<float> lost);

/// The average of all ranks' vectors, of which each rank gathers all and adds them in the order of ranks: those that are
/// staged when this begins. Of `how` allgather_sparse() looks at the same; `lost` is as below.
template <class V>
Task<void> average_gathered_staged(Transport& net, StagedEntries<V> mine, SparseReduction how, StagedSum<V> average,
                                   StagedSum<float> lost);

/// allreduce_sparse() of what is staged when this begins. Throws std::invalid_argument where that is no vector. `lost`, if
/// V is float, gets what rounding on the wire loses on this rank, whose entries are those that are not 0.
template <class V>
Task<void> allreduce_staged(Transport& net, StagedEntries<V> mine, SparseReduction how, StagedSum<V> sum,
                            StagedSum<float> lost);

/// The same of reduce_scatter_sparse(). `sum` is as long as this rank's slice, from whose beginning its indices count.
template <class V>
Task<void> reduce_scatter_staged(Transport& net, StagedEntries<V> mine, Partition slices, SparseReduction how,
                                 StagedSum<V> sum, StagedSum<float> lost);

/// The same of allgather_sparse(). `all.form` has a number of entries for each rank. In `all.indices` and `all.values` each
/// rank's have the same room, one rank's behind the other's; `all.dense` is not looked at. A rank with more entries than
/// that fails the operation.
template <class V>
Task<void> allgather_staged(Transport& net, StagedEntries<V> mine, SparseReduction how, StagedSum<V> all,
                            StagedSum<float> lost);

}  // namespace telegrad
