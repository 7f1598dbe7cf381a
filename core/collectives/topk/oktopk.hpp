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
  double balance_factor = 4.0;          // a largest share of more than this times the mean: shares are made alike first, where
                                        // doubling would exceed its bound
  /// As the paper has it: averaged boundaries, kept until τ whatever becomes of them; all sums gathered for the threshold,
  /// which is kept until τ' whatever it selects; shares gathered by recursive doubling.
  bool as_published = false;
  /// Where tensors lie in the index range, ascending. Then sums are compared across tensors as an optimizer values them that
  /// divides by the root of the second moment v of gradients: a step along an entry g gains g²/√v, so |g|/v^(1/4) is compared.
  /// v is the tensor's: entries that are nearly always zero have a tiny v of their own. Not where sums are f16, and not as
  /// published (CHECKed).
  std::vector<IndexRange> tensors{};
};

/// What one call leaves to the next: derived from what all ranks have exchanged, so the same on all.
struct OkTopkState {
  std::uint64_t calls = 0;
  double threshold = 0.0;                // a magnitude of sums
  std::vector<std::uint64_t> lengths{};  // of the ranks' slices of the index range; none before the first call
  bool spread = false;  // no rank had more than 2/P of its entries for one owner: the next call may send them uncounted
  std::vector<double> squares{};  // of each tensor the mean square of sums at the ends of periods; none before the first

  /// Differs, but for bad luck, where states or settings differ.
  std::uint64_t digest(const OkTopkSettings& settings) const;
};

template <class V>
using OkTopkSum = TopkResult<V, OkTopkState>;

/// By how many entries more than a rank has at most its slice may bring an owner: as many as ranks, and more where chance
/// would bring that, since the number of evenly spread entries in a slice deviates by about √k'.
std::uint64_t oktopk_excess(std::uint64_t most, Rank ranks);
/// Words that a rank moves at most in a call, of `most` = k' below.
inline std::uint64_t oktopk_words_most(std::uint64_t most, Rank ranks) { return 6 * most + 2 * oktopk_excess(most, ranks); }

/// What only some calls do, as their reports say: they cut slices, find the threshold anew, make shares alike.
struct OkTopkSteps {
  bool cut = true;
  bool exact = true;
  bool balanced = true;
};

/// Bytes that a rank sends or receives at most in a call that does these steps, counts and headers included, where no value
/// is rounded. For float, a call that does none of them moves at most 6.5 times 4 bytes for each of `most`, up to most/4 ranks
/// and a dimension of 1,000 times `most`. Formats that round have fewer for values, and a header of 32 bytes in each message of
/// more than some entries.
template <class V>
std::uint64_t oktopk_bytes_most(std::uint64_t most, std::uint64_t k, Rank ranks, std::uint64_t dimension,
                                OkTopkSteps steps = {});

/// Top-k of the sum (or mean) of all ranks' vectors: Topk(Σ mine), the same bits on every rank, each sum formed in the order
/// of ranks. `mine`: sparse (CHECKed), what this rank has selected of its own, any number of entries. With k' the largest
/// of all ranks' and the sum's numbers of entries, a rank sends and receives at most oktopk_words_most(k', P) words.
///
/// At first and every τ' calls the sum keeps its k largest magnitudes, and what equals the least of these: as many as make
/// 2k together, those of the lowest indices; zeros if there are fewer than k. In between it keeps what reaches the last
/// call's threshold, gently corrected. Where that is more than a quarter of k too many or too few, the best of some
/// thresholds near it is taken, without another exchange if it is too many, and k at least 80P; and the exact one is found where none of these is near enough. `state` is that which the last call on all ranks has left, or
/// a new one. With `tensors` the largest are those of the largest magnitudes times a weight of their tensor. It follows
/// from sums of the periods before, and is changed where the threshold is found anew. V is float, double, bf16 or f16; `reduction` sum or avg (CHECKed).
/// Where `wire` rounds, entries are rounded on their way to their owner, and those that the sum keeps when they are gathered:
/// it is the top k of sums of rounded values. Where rounding would save less than a message's header takes, none is. `residual`: empty, or of one element per index, to which what rounding loses on
/// this rank is added; `left` has what is not in the sum as it was given. Over all ranks the sum (of a mean, as often as
/// there are ranks), `left` and what was added are what was given.
/// Not where messages carry their size only (CHECKed).
template <class V>
Task<OkTopkSum<V>> allreduce_oktopk(Transport& net, SparseVector<V> mine, OkTopkSettings settings, OkTopkState state,
                                    Reduction reduction, WireFormat wire, std::span<float> residual = {});

}  // namespace telegrad
