#include "collectives/sparse/level_cost.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "collectives/dense/allreduce_two_level.hpp"
#include "collectives/dense/choice.hpp"

namespace telegrad {
namespace {

NetworkCosts of_port(double beta_s_per_byte) {
  return {.alpha_s = 0.0, .beta_s_per_byte = beta_s_per_byte, .gamma_s_per_byte = 0.0};
}

}  // namespace

SparseLevelCosts::SparseLevelCosts(const SparseSumShape& shape, const Nodes& nodes, const NetworkCosts& between,
                                   const NodeCosts& costs)
    : shape_(shape), nodes_(nodes), between_(between), costs_(costs) {}

double SparseLevelCosts::two_level_s(double entries, const SumGrowth& members, double sum_entries) const {
  const double slices = nodes_.slices();
  SparseSumShape shape = inside();
  if (shape.shares_memory) {
    shape.indices = IndexFormat::none;
    shape.packs_values = false;
  }
  const SparseCosts near(shape, costs_.inside);
  const SparseCosts far(between(), between_);
  const unsigned rounds_together = static_cast<unsigned>(std::bit_width(shape.ranks)) - 1;
  const SumGrowth sums = members.of_sums_doubled(rounds_together).of_slice(slices);
  const double between_s = std::min(far.split_s(sums.entries_doubled(0), sum_entries / slices), far.doubling_s(sums, 0));

  return near.reduce_scatter_s(entries) + between_s + near.allgather_s(sum_entries);
}

double SparseLevelCosts::doubling_s(const SumGrowth& members, unsigned round) const {
  const SparseCosts costs(shape_, between_);
  const unsigned end = std::max(round, nodes_.rounds_inside());
  return costs.doubling_s(members, round) - costs.rounds_s(members, round, end) +
         SparseCosts(shape_, costs_.inside).rounds_s(members, round, end);
}

double SparseLevelCosts::empty_rounds_s(unsigned round) const {
  const unsigned rounds = SparseCosts(shape_, between_).rounds();
  const unsigned inside = std::clamp(nodes_.rounds_inside(), round, rounds) - round;
  return inside * costs_.inside.alpha_s + (rounds - round - inside) * between_.alpha_s;
}

double SparseLevelCosts::flat_s(double entries, double sum_entries) const {
  const SparseCosts costs(shape_, to_all());
  if (costs.exchanges()) return costs.split_s(entries, sum_entries);
  return costs.reduce_scatter_s(entries) + SparseCosts(shape_, round_the_ring()).allgather_s(sum_entries);
}

double SparseLevelCosts::filled_s(double entries) const { return SparseCosts(shape_, to_all()).filled_s(entries); }

double SparseLevelCosts::dense_s(Algorithm algorithm) const {
  if (algorithm == Algorithm::two_level) return dense_two_level_s();
  return SparseCosts(shape_, algorithm == Algorithm::ring ? round_the_ring() : between_).dense_s(algorithm);
}

// What is inside of a segment and what is between goes on beside the other of segments before and after it, but for what both
// need a rank's port for.
double SparseLevelCosts::dense_two_level_s() const {
  SparseSumShape near = inside();
  SparseSumShape far = between();
  const std::size_t segments = two_level_segments(static_cast<std::size_t>(far.dimension) * size_of(far.dtype));
  near.dimension = (near.dimension + segments - 1) / segments;
  far.dimension = (far.dimension + segments - 1) / segments;
  const Algorithm algorithm = choose_between(far.ranks, static_cast<std::size_t>(far.dimension) * size_of(far.dtype));
  const auto inside_of = [&](const NetworkCosts& costs) {
    const SparseCosts together(near, costs);
    return std::min(together.dense_s(Algorithm::ring), together.dense_s(Algorithm::rabenseifner));
  };
  const auto between_of = [&](const NetworkCosts& costs) { return SparseCosts(far, costs).dense_s(algorithm); };

  const double inside_s = inside_of(costs_.inside);
  const double between_s = between_of(between_);
  double longest_s = std::max(inside_s, between_s);
  if (!costs_.share_memory) {
    const double port_s = inside_of(of_port(costs_.inside.beta_s_per_byte)) + between_of(of_port(beta_alone_s_per_byte()));
    longest_s = std::max(longest_s, port_s);
  }
  return inside_s + between_s + (static_cast<double>(segments) - 1.0) * longest_s;
}

// A sum of the ranks of one node.
SparseSumShape SparseLevelCosts::inside() const {
  SparseSumShape shape = shape_;
  shape.ranks = (nodes_.ranks() + nodes_.count() - 1) / nodes_.count();
  shape.shares_memory = costs_.share_memory;
  return shape;
}

// A sum of the owners of one slice.
SparseSumShape SparseLevelCosts::between() const {
  SparseSumShape shape = shape_;
  shape.ranks = nodes_.count();
  shape.dimension = (shape.dimension + nodes_.slices() - 1) / nodes_.slices();
  return shape;
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
  costs.beta_s_per_byte = std::max(
      {nodes_.leaving() * between_.beta_s_per_byte, beta_alone_s_per_byte(), costs_.inside.beta_s_per_byte});
  return costs;
}

}  // namespace telegrad
