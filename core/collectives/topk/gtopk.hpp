#pragma once

#include <cstdint>

#include "base/types.hpp"
#include "codec/sparse_vector.hpp"
#include "codec/wire.hpp"
#include "collectives/topk/result.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// What all ranks agree on, for all calls.
struct GTopkSettings {
  std::uint64_t k = 1;  // how many entries the sum keeps, and a message has at most
};

/// A call leaves nothing to the next.
struct GTopkState {
  /// Differs, but for bad luck, where settings differ.
  std::uint64_t digest(const GTopkSettings& settings) const;
};

template <class V>
using GTopkSum = TopkResult<V, GTopkState>;

/// The sum (or mean) of all ranks' vectors, of which every merge of two keeps the k largest magnitudes: of what is equal,
/// the lowest indices. Not always the k largest of the whole sum; the same bits on every rank. `mine`: sparse (CHECKed),
/// what this rank has selected of its own, any number of entries.
///
/// Nothing is lost: `left` holds this rank's entries at indices that the sum does not keep, and, at those that it keeps, the
/// partial sums that this rank has dropped in a merge. So the sum (P times the mean) and all ranks' `left` together are what
/// was given.
///
/// A rank sends at most k entries for each of ⌈log2 P⌉ levels, and receives as many: 4k words a level. V is float, double, bf16
/// or f16; `reduction` sum or avg, `wire` of native values (both CHECKed). Not where messages carry their size only (CHECKed).
template <class V>
Task<GTopkSum<V>> allreduce_gtopk(Transport& net, SparseVector<V> mine, GTopkSettings settings, GTopkState state,
                                  Reduction reduction, WireFormat wire);

}  // namespace telegrad
