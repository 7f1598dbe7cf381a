#pragma once
// Split and allgather of shares that are shorter than a header is worth.

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "codec/slices.hpp"
#include "codec/sparse_vector.hpp"
#include "codec/wire.hpp"
#include "collectives/support/partition.hpp"
#include "collectives/support/traffic.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Whether shares of `entries` entries in all, one for each rank, go without headers and unrounded: they are so short on
/// average that little could be saved. All ranks agree on the number of entries and on the values' format, and so on this:
/// layouts that lose nothing need not be alike, and do not count here.
template <class V>
bool are_short(std::uint64_t entries, Rank ranks, const WireFormat& wire);

/// A share on its way, and how many may be in one direction.
struct SendingShort {
  SendingShort(Transport& net, Rank to, Step step, Buffer share)
      : encoded(std::move(share)), sending(net, to, step, encoded.bytes()) {}
  Buffer encoded;
  Transport::Sending sending;
};
inline constexpr std::size_t kShortWindow = 16;

/// The sum (or mean) of all ranks' entries in this rank's slice, formed in the order of ranks: as reduce_owned_slice().
/// `most`: no rank has more entries. Uses the step `step`.
template <class V>
Task<OwnedSlice<V>> split_short_shares(Transport& net, const SparseVector<V>& mine, const Partition& slices,
                                       std::uint64_t most, Reduction reduction, SparseTraffic& traffic, Step step);

/// Where the ranks' shares are to lie, one behind the other: `begins` has one more than there are ranks.
template <class V>
struct GatheredShares {
  std::span<const std::size_t> begins;
  std::span<const IndexRange> ranges;  // which each lies in
  std::span<std::uint32_t> indices;
  std::span<V> values;
};

/// Every rank's share, of which `mine` is this one's; by Bruck's allgather if `doubles`, else round a ring. Uses steps from
/// `first_step` on, P at most.
template <class V>
Task<void> gather_short_shares(Transport& net, const SparseView<V>& mine, GatheredShares<V> into, bool doubles,
                               Step first_step);

}  // namespace telegrad
