#pragma once
// What sums of sparse streams cost where ranks live on nodes: on two levels (sparse/two_level.hpp), and by slices of
// all ranks, whose messages partly stay inside. Which rank decides when, this must not know.

#include "base/types.hpp"
#include "collectives/sparse/cost.hpp"
#include "collectives/sparse/growth.hpp"
#include "collectives/support/nodes.hpp"

namespace telegrad {

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
