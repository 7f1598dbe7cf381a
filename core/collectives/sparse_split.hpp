#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/types.hpp"
#include "collectives/sparse_messages.hpp"
#include "sparse/slices.hpp"
#include "sparse/stream.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// A part of every slice of the index range, so that one part is reduced while the next comes.
struct SplitBucket {
  Step first_step = 0;
  std::size_t number = 0;
  std::size_t buckets = 1;  // of a slice, all alike in length
  /// If given: called once all messages have come, before they are reduced, with the number of entries that they hold.
  std::function<void(std::uint64_t entries)> received = nullptr;
  /// If given, of one element per entry of `mine`, whose shares must then not go dense (CHECKed): becomes what rounding on
  /// the wire loses; what is not sent keeps what it has.
  std::span<float> errors{};
};

/// This rank's slice of the sum (or mean) of all ranks' streams, of `slices` of their index range, the same on all ranks.
/// Every rank sends every other its entries there: with k entries per rank, spread evenly over the slices, k(P−1)/P each
/// way. Dense where that is shorter on the wire (see switch_entries()). Its entries are added in the order of ranks. Of one
/// bucket that part of the slice. Uses split_steps() steps from `bucket.first_step` on.
template <class V>
Task<OwnedSlice<V>> reduce_owned_slice(Transport& net, const SparseStream<V>& mine, const Partition& slices,
                                       const SparseReduction& how, SplitBucket bucket = {});

template <class V>
Step split_steps(const Transport& net, const Partition& slices);

}  // namespace telegrad
