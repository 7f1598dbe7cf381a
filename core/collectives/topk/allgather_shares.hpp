#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/slices.hpp"
#include "codec/sparse_vector.hpp"
#include "codec/wire.hpp"
#include "collectives/support/partition.hpp"
#include "collectives/support/traffic.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Shares of up to so many bytes, not packed, may go by doubling, as far as no rank has to send too much by that: it saves
/// messages and costs copies.
inline constexpr std::size_t kDoubledShareBytes = std::size_t{64} << 10;

/// How shares of which all ranks know how many entries they have are gathered; the same on all ranks.
struct ShareGathering {
  WireFormat wire{};
  double balance_factor = 4.0;  // a largest share of more than this times the mean: shares are made alike first, unless short
                                // messages by doubling move at most 2K + P entries anyway
  bool always_doubles = false;  // the messages of recursive doubling whatever the shares, as Ok-Topk's paper has it
  bool sends_once = false;      // no rank sends more than K entries, whatever the shares: by a ring, and none is made alike
  /// As in SparseReduction; `weight`: how much of it is added. Values are rounded once, by who gathers them: every rank
  /// decodes the same bytes, that one too.
  std::span<float> residual{};
  float weight = 1.0F;
};

/// Every rank's share of a vector, the same on every rank; `mine` are sparse entries of this rank's slice, and `counts` says
/// how many each rank has (CHECKed for this one). With K entries in all, a rank sends and receives at most K entries, and
/// at most K and K/P + 1 more where shares are made alike. V is float, double, bf16 or f16. `was_balanced`: becomes
/// whether they were. Uses steps from `first_step` on, about P times as many as a message has pieces.
template <class V>
Task<SparseVector<V>> allgather_shares(Transport& net, OwnedSlice<V> mine, const Partition& slices,
                                       std::vector<std::uint64_t> counts, ShareGathering how, SparseTraffic& traffic,
                                       bool& was_balanced, Step first_step);

}  // namespace telegrad
