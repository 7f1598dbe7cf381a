#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "codec/slices.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/support/kept_messages.hpp"
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
  /// No share can be dense: who sends a dense one is named.
  bool only_entries = false;
};

/// What all ranks have in this rank's slice. Own entries lie in the rank's vector, others in this object, which may move.
template <class V>
struct GivenShares {
  const SparseView<V>& share(Rank source) const { return decoded[source].view(); }

  std::vector<Decoded<V>> decoded;  // by rank
  // Where they lie.
  std::vector<Buffer> messages;
  KeptMessages kept;
  Buffer nothing;
};

/// Every rank sends every other its entries of the other's slice, of `slices` of the index range, the same on all ranks:
/// with k entries per rank, spread evenly, k(P−1)/P each way. A share goes dense where that is shorter on the wire (see
/// switch_entries()). Of one bucket that part of slices. Uses split_steps() steps from `bucket.first_step` on.
template <class V>
Task<void> give_shares(Transport& net, const SparseVector<V>& mine, const Partition& slices, const SparseReduction& how,
                       const SplitBucket& bucket, GivenShares<V>& given);

/// The sum (or mean) of what all shares have in `range`, added in the order of ranks; dense where that is shorter on the wire.
/// `givers`, if given: becomes which ranks have each index (SliceReduction::take_givers()).
template <class V>
Task<OwnedSlice<V>> reduce_given(Transport& net, const GivenShares<V>& given, IndexRange range, const SparseReduction& how,
                                 Array<std::uint8_t>* givers = nullptr);

/// Both, one after the other: this rank's slice of the sum.
template <class V>
Task<OwnedSlice<V>> reduce_owned_slice(Transport& net, const SparseVector<V>& mine, const Partition& slices,
                                       const SparseReduction& how, SplitBucket bucket = {});

template <class V>
Step split_steps(const Transport& net, const Partition& slices);

}  // namespace telegrad
