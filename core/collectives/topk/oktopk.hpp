#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/types.hpp"
#include "codec/sparse_vector.hpp"
#include "codec/wire.hpp"
#include "collectives/topk/result.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// What all ranks agree on, for all calls.
struct OkTopkSettings {
  std::uint64_t k = 1;                  // how many entries the sum is to keep
  std::uint64_t boundaries_every = 64;  // τ, in calls
  std::uint64_t threshold_every = 32;   // τ', in calls
  double balance_factor = 4.0;          // a largest share of more than this times the mean: shares are made alike first
  /// As the paper has it: averaged boundaries, kept until τ whatever becomes of them; all sums gathered for the threshold,
  /// which is kept until τ' whatever it selects; shares gathered by recursive doubling.
  bool as_published = false;
};

/// What one call leaves to the next: derived from what all ranks have exchanged, so the same on all.
struct OkTopkState {
  std::uint64_t calls = 0;
  double threshold = 0.0;                // a magnitude of sums
  std::vector<std::uint64_t> lengths{};  // of the ranks' slices of the index range; none before the first call

  /// Differs, but for bad luck, where states or settings differ.
  std::uint64_t digest(const OkTopkSettings& settings) const;
};

template <class V>
using OkTopkSum = TopkResult<V, OkTopkState>;

/// Top-k of the sum (or mean) of all ranks' vectors: Topk(Σ mine), the same bits on every rank, each sum formed in the order
/// of ranks. `mine`: sparse (CHECKed), what this rank has selected of its own, any number of entries. With k' the largest
/// of all ranks' and the sum's numbers of entries, a rank sends and receives at most 6k' + 2P words in every call.
///
/// At first and every τ' calls the sum keeps its k largest magnitudes, and all that equal the least of these; zeros if
/// there are fewer. In between it keeps what reaches the last call's threshold, gently corrected; where that would be more
/// than a quarter off k, the threshold is found anew at once. `state` is that which the last call on all ranks has left, or
/// a new one. V is float, double, bf16 or f16; `reduction` sum or avg (CHECKed).
/// Where `wire` rounds, entries are rounded on their way to their owner, and those that the sum keeps when they are gathered:
/// it is the top k of sums of rounded values. `residual`: empty, or of one element per index, to which what rounding loses on
/// this rank is added; `left` has what is not in the sum as it was given. Over all ranks the sum (of a mean, as often as
/// there are ranks), `left` and what was added are what was given.
/// Not where messages carry their size only (CHECKed).
template <class V>
Task<OkTopkSum<V>> allreduce_oktopk(Transport& net, SparseVector<V> mine, OkTopkSettings settings, OkTopkState state,
                                    Reduction reduction, WireFormat wire, std::span<float> residual = {});

}  // namespace telegrad
