#include "collectives/sparse_level_cost.hpp"

#include <algorithm>
#include <bit>

namespace telegrad {

SparseLevelCosts::SparseLevelCosts(const SparseSumShape& shape, const Nodes& nodes, const NetworkCosts& between,
                                   const NodeCosts& costs)
    : shape_(shape), nodes_(nodes), between_(between), costs_(costs) {}

double SparseLevelCosts::two_level_s(double entries, const SumGrowth& members, double sum_entries) const {
  const Rank together = (nodes_.ranks() + nodes_.count() - 1) / nodes_.count();
  const double slices = nodes_.slices();

  SparseSumShape inside = shape_;
  inside.ranks = together;
  inside.shares_memory = costs_.share_memory;
  if (inside.shares_memory) {
    inside.indices = IndexFormat::none;
    inside.packs_values = false;
  }
  const SparseCosts near(inside, costs_.inside);

  SparseSumShape between = shape_;
  between.ranks = nodes_.count();
  between.dimension = (between.dimension + nodes_.slices() - 1) / nodes_.slices();
  const SparseCosts far(between, between_);
  const SumGrowth sums = members.of_sums_doubled(static_cast<unsigned>(std::bit_width(together)) - 1).of_slice(slices);
  const double between_s = std::min(far.split_s(sums.entries_doubled(0), sum_entries / slices), far.doubling_s(sums, 0));

  return near.reduce_scatter_s(entries) + between_s + near.allgather_s(sum_entries);
}

double SparseLevelCosts::doubling_s(const SumGrowth& members, unsigned round) const {
  const SparseCosts costs(shape_, between_);
  const unsigned end = std::max(round, nodes_.rounds_inside());
  return costs.doubling_s(members, round) - costs.rounds_s(members, round, end) +
         SparseCosts(shape_, costs_.inside).rounds_s(members, round, end);
}

double SparseLevelCosts::flat_s(double entries, double sum_entries) const {
  const SparseCosts costs(shape_, to_all());
  if (costs.exchanges()) return costs.split_s(entries, sum_entries);
  return costs.reduce_scatter_s(entries) + SparseCosts(shape_, round_the_ring()).allgather_s(sum_entries);
}

double SparseLevelCosts::filled_s(double entries) const { return SparseCosts(shape_, to_all()).filled_s(entries); }

double SparseLevelCosts::dense_s(Algorithm algorithm, std::optional<double> entries) const {
  const SparseCosts costs(shape_, algorithm == Algorithm::ring ? round_the_ring() : between_);
  return costs.dense_s(algorithm, entries);
}

// Of a rank that sends as much to each of the others.
NetworkCosts SparseLevelCosts::to_all() const {
  const double others = nodes_.ranks() - 1.0;
  const double neighbours = static_cast<double>(nodes_.ranks()) / nodes_.count() - 1.0;
  NetworkCosts costs = between_;
  costs.beta_s_per_byte = ((others - neighbours) * between_.beta_s_per_byte + neighbours * costs_.inside.beta_s_per_byte) / others;
  return costs;
}

// Only some ranks of a node have a neighbour beyond, and share its link.
NetworkCosts SparseLevelCosts::round_the_ring() const {
  NetworkCosts costs = between_;
  const double alone = costs_.beta_alone_s_per_byte > 0.0 ? costs_.beta_alone_s_per_byte : between_.beta_s_per_byte;
  costs.beta_s_per_byte = std::max({nodes_.leaving() * between_.beta_s_per_byte, alone, costs_.inside.beta_s_per_byte});
  return costs;
}

}  // namespace telegrad
