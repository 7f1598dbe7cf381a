#pragma once
// What every allreduce gives that keeps a part of the sum.

#include <algorithm>
#include <cstdint>

#include "codec/sparse_vector.hpp"
#include "collectives/support/traffic.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// What one call has done on this rank.
struct TopkReport {
  SparseTraffic traffic{};
  Transport::MovedBytes bytes{};  // all of them: entries, headers and counts
  std::uint64_t local_most = 0;  // the largest number of entries that a rank has given; of this rank where none is known
  std::uint64_t selected = 0;    // how many entries the sum keeps
  std::uint64_t overflow = 0;    // of this rank's own entries, how many did not fit into its messages
  bool cut = false;              // slices were cut in this call,
  bool exact = false;            // and the threshold was found: the sum has the k largest, and what equals the least of them
  bool balanced = false;         // shares were made alike before they were gathered

  std::uint64_t bytes_most() const { return std::max(bytes.sent, bytes.received); }
  /// An index is a word, a value is one.
  std::uint64_t words_most() const { return 2 * std::max(traffic.entries_sent, traffic.entries_received); }
};

template <class V, class State>
struct TopkResult {
  SparseVector<V> sum;
  SparseVector<V> left;  // what of this rank's entries, or of sums that it has dropped, is not in the sum: for its residual
  State state;           // for the next call
  TopkReport report;
};

}  // namespace telegrad
