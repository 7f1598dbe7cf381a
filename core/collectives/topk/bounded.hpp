#pragma once

#include <cstdint>
#include <vector>

#include "base/types.hpp"
#include "codec/sparse_vector.hpp"
#include "codec/wire.hpp"
#include "collectives/topk/result.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// What all ranks agree on, for all calls.
struct BoundedTopkSettings {
  std::uint64_t k = 1;                  // how many entries the sum is to keep
  double slack = 1.5;                   // a message has room for slack·k/P entries
  std::uint64_t boundaries_every = 64;  // in calls
};

/// What one call leaves to the next: derived from what all ranks have exchanged, so the same on all.
struct BoundedTopkState {
  std::uint64_t calls = 0;
  double threshold = 0.0;                // the magnitude from which it has kept sums: for whoever wants to know
  std::vector<std::uint64_t> lengths{};  // of the ranks' slices of the index range; none before the first call

  /// Differs, but for bad luck, where states or settings differ.
  std::uint64_t digest(const BoundedTopkSettings& settings) const;
};

template <class V>
using BoundedTopkSum = TopkResult<V, BoundedTopkState>;

/// How many entries a message between two of so many ranks has room for, of `dimension` elements.
std::size_t bounded_topk_capacity(const BoundedTopkSettings& settings, Rank ranks, std::uint64_t dimension);

/// About the k largest of the sum (or mean) of all ranks' vectors, the same bits on every rank, in messages whose number
/// and sizes follow from P, k, slack, the dimension, V, and whether slices are cut in this call, which its number says: the
/// entries make no difference, so that memory can be had, and time foretold, before there are any. `mine`: sparse
/// (CHECKed), what this rank has selected of its own, any number of entries.
///
/// With capacity C = ⌈slack·k/P⌉: a rank sends every other one at most C of its entries, those of the largest magnitudes,
/// and keeps all of its own slice; owners form sums in the order of ranks, and keep at most C each, the largest of those that
/// reach the magnitude that about k of all have; of what is equal, the lowest indices. What does not fit is not in the sum,
/// and, as all that the sum does not keep, in `left`: nothing is lost. Where ranks' entries lie in different places most of
/// them may not fit, whatever the slack.
///
/// A rank sends and receives 4C(P−1) words in every call, as many as it has or not. V is float, double, bf16 or f16;
/// `reduction` sum or avg; `wire` native values and plain indices, as blocks have them (all CHECKed). Where messages carry
/// their size only, sum and rest are empty.
template <class V>
Task<BoundedTopkSum<V>> allreduce_bounded_topk(Transport& net, SparseVector<V> mine, BoundedTopkSettings settings,
                                               BoundedTopkState state, Reduction reduction, WireFormat wire);

}  // namespace telegrad
