#pragma once
// Entries that a stream of a device puts into host memory, and the sum that it takes from there. How many they are is in
// that memory too: nobody on the host knows it before the gate of the operation is open. What a stream is, this must not
// know.

#include <cstdint>
#include <span>

#include "collectives/sparse/messages.hpp"
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

/// allreduce_sparse() of what is staged when this begins. Throws std::invalid_argument where that is no vector. `lost`, if
/// V is float, gets what rounding on the wire loses on this rank, whose entries are those that are not 0.
template <class V>
Task<void> allreduce_staged(Transport& net, StagedEntries<V> mine, SparseReduction how, StagedSum<V> sum,
                            StagedSum<float> lost);

}  // namespace telegrad
