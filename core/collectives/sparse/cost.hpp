#pragma once
// What the sums of sparse vectors cost on the α-β-γ network (docs/explanation/simulation.md), as closed forms: what
// Algorithm::automatic decides by. Renggli et al., "SparCML", SC 2019, §5.3, with the bytes that messages really have, and
// the work. Which rank decides when, this must not know.

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/types.hpp"
#include "codec/wire.hpp"
#include "collectives/support/nodes.hpp"
#include "transport/envelope.hpp"

namespace telegrad {

/// How many entries a sum of sparse vectors has, before it is there. Some of a vector's entries are at indices that all
/// ranks have in common, its `overlap`; the others are independent, uniform. Which algorithms there are, this must not know.
///
/// An index that is not common is missing in the sum of m vectors with probability q^m: it has N − (N − C)·q^m entries, of
/// which C are common. With C = 0 that is K = N(1 − (1 − d)^m), the mean of what Renggli et al., "SparCML",
/// SC 2019, §5.1, call K.
class SumGrowth {
 public:
  /// Vectors of `entries` entries, of which the share `overlap` is common.
  SumGrowth(std::uint64_t dimension, double entries, double overlap);

  /// As the sums of half as many and of 2^doublings (at least 2) vectors had `half` entries, on average, and `full`. Only
  /// operations that IEEE 754 rounds: it is the same number on all machines.
  static SumGrowth seen(std::uint64_t dimension, double half, double full, unsigned doublings);

  /// Of the sum of so many vectors.
  double entries(double vectors) const;
  /// Of 2^doublings, the same on all machines.
  double entries_doubled(unsigned doublings) const;
  /// The same vectors, of which each is the sum of `vectors`.
  SumGrowth of_sums(double vectors) const;
  /// The same of 2^doublings, the same on all machines.
  SumGrowth of_sums_doubled(unsigned doublings) const;
  /// Of the vectors' entries in one of so many equal slices of the range.
  SumGrowth of_slice(double slices) const;

 private:
  SumGrowth() = default;

  double dimension_ = 0;
  double elsewhere_ = 0;     // N − C
  double missing_ = 1;  // q
};

/// The overlap with which `ranks` vectors of `entries` entries have a sum of `sum_entries`: between 0 and 1. The inverse of
/// SumGrowth.
double overlap_of(std::uint64_t dimension, double entries, Rank ranks, double sum_entries);

/// A message of b bytes costs α + bβ, or α + bβ' where two ranks send to each other at once; work on b bytes bγ.
struct NetworkCosts {
  double alpha_s = 10e-6;
  double beta_s_per_byte = 1e-9;
  double beta_exchange_s_per_byte = 0.0;  // β'; 0: β
  double gamma_s_per_byte = 0.25e-9;
};
/// Where nothing was measured: over the memory of one host, and over a network of 10 Gbit/s.
NetworkCosts costs_unmeasured(bool shares_memory);

/// Where ranks live on nodes: inside of one, and, if it is known, β between two of which one rank each sends; the costs that
/// stand beside it are between nodes while all of their ranks send.
struct NodeCosts {
  NetworkCosts inside = costs_unmeasured(true);
  std::optional<double> beta_alone_s_per_byte{};  // not known: that of all
  bool share_memory = true;                       // all of them are taken to: what a rank knows of its own node others do not
};

/// A sum over `ranks` ranks of vectors of `dtype`, whose messages wish for `indices`, and their values packed or not.
struct SparseSumShape {
  Rank ranks = 1;
  std::uint64_t dimension = 0;
  DType dtype = DType::f32;
  IndexFormat indices = IndexFormat::none;
  bool packs_values = false;
  double switch_factor = 1.0;
  bool shares_memory = false;  // as Transport has it
  bool fills = false;          // whether allreduce_filled() may sum it
  bool into_dense = false;     // where the sum is to be written, if it is sparse
};

/// Whether vectors of `bytes` bytes are long enough for allreduce_filled(), and ranks few enough.
bool is_for_filling(Rank ranks, std::uint64_t bytes);
/// Whether so many entries of a vector that may be summed so are read where they lie: fewer are hardly ever summed densely.
bool is_for_borrowing(std::uint64_t dimension, double entries);

class SparseCosts {
 public:
  SparseCosts(const SparseSumShape& shape, const NetworkCosts& costs) : shape_(shape), costs_(costs) {}

  /// Rounds of recursive doubling, and who takes part in them; the others fold.
  unsigned rounds() const;
  double members() const;

  /// From round `round` on, the unfolding included, and for round 0 the folding. `members`: how members' sums grow.
  double doubling_s(const SumGrowth& members, unsigned round) const;
  /// Of it, the rounds from `round` up to `end`.
  double rounds_s(const SumGrowth& members, unsigned round, unsigned end) const;
  /// `entries` per rank, `sum_entries` in the sum; slices go dense where that is shorter.
  double split_s(double entries, double sum_entries) const;
  /// Whether all send their slice of the sum to all at once, and not round a ring.
  bool exchanges() const;
  /// The first half, after which every rank has the sum of one slice, and its last, in which slices go round as they are.
  double reduce_scatter_s(double entries) const;
  double allgather_s(double sum_entries) const;
  /// split_s() where every slice of the sum goes dense.
  double split_dense_s(double entries) const;
  /// A dense allreduce by `algorithm`, which knows no nodes.
  double dense_s(Algorithm algorithm) const;
  /// Before it, a sparse vector is made dense.
  double made_dense_s() const;
  /// Borrowed entries are copied first where they are not read where they lie.
  double copied_s(double entries) const;
  /// Whether dense sums go by allreduce_filled(), and what that takes.
  bool sums_filled() const;
  double filled_s(double entries) const;
  /// Writing a sparse sum to where a dense one would have come to lie. Between hosts that is next to nothing, and 0.
  double written_s(double sum_entries) const;

 private:
  // What it takes to make it, and to read it.
  struct Message {
    double bytes;
    double encode_s;
    double decode_s;
  };
  Message message(std::uint64_t range, double entries) const;
  double message_bytes(std::uint64_t range, double entries) const;
  double memory_bytes(std::uint64_t range, double entries) const;
  double packing_s(std::uint64_t range, double entries) const;
  double delta(std::uint64_t range) const;
  double added_message_s(double entries, double byte_s, double added_bytes) const;
  double split_phase_s(double entries) const;
  bool leaves_known_out() const;
  bool counts_go_ahead() const;
  double known_bytes(double entries, double sum_entries) const;
  // `entries` of each rank; `sum`: of a slice.
  double given_bytes(double entries) const;
  double second_half_s(double entries, const Message& sum) const;
  double exchange_s(double entries, double reduce_s, const Message& sum) const;
  double gather_s(const Message& sum) const;
  std::uint64_t slice() const { return (shape_.dimension + shape_.ranks - 1) / shape_.ranks; }
  double exchange_s_per_byte() const {
    return costs_.beta_exchange_s_per_byte > 0.0 ? costs_.beta_exchange_s_per_byte : costs_.beta_s_per_byte;
  }

  SparseSumShape shape_;
  NetworkCosts costs_;
};

/// What sums of sparse vectors cost where ranks live on nodes: on two levels (sparse/two_level.hpp), and by slices of
/// all ranks, whose messages partly stay inside.
/// Nodes of unlike numbers of ranks count as if all had as many, on average, and each rank owned a slice.
class SparseLevelCosts {
 public:
  /// `shape`: of a sum of all ranks. `nodes`: on two levels; outlives it.
  SparseLevelCosts(const SparseSumShape& shape, const Nodes& nodes, const NetworkCosts& between, const NodeCosts& costs);

  /// `entries` per rank, whose sums grow as those of `members`; `sum_entries` in the sum.
  double two_level_s(double entries, const SumGrowth& members, double sum_entries) const;
  /// As SparseCosts has it; the first rounds may stay inside.
  double doubling_s(const SumGrowth& members, unsigned round) const;
  /// Rounds of doubling from round `round` on whose messages say nothing.
  double empty_rounds_s(unsigned round) const;
  /// By slices of all ranks.
  double flat_s(double entries, double sum_entries) const;
  /// As SparseCosts has them.
  double filled_s(double entries) const;
  /// Of two_level too.
  double dense_s(Algorithm algorithm) const;

 private:
  SparseSumShape inside() const;
  SparseSumShape between() const;
  double dense_two_level_s() const;
  double beta_alone_s_per_byte() const { return costs_.beta_alone_s_per_byte.value_or(between_.beta_s_per_byte); }
  NetworkCosts to_all() const;
  NetworkCosts round_the_ring() const;

  SparseSumShape shape_;
  const Nodes& nodes_;
  NetworkCosts between_;
  NodeCosts costs_;
};

}  // namespace telegrad
