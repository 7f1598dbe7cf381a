// What sums on nodes cost as closed forms, and which dense algorithm follows from tables and costs.
#include "collectives/sparse/cost.hpp"

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "collectives/sparse/choice.hpp"
#include "testing.hpp"

namespace telegrad {
namespace {

constexpr NetworkCosts kBetween{.alpha_s = 1e-6, .beta_s_per_byte = 4e-9, .gamma_s_per_byte = 1e-10};
constexpr NetworkCosts kInside{.alpha_s = 1e-7, .beta_s_per_byte = 1e-10, .gamma_s_per_byte = 1e-10};

const Nodes& two_of_four() {
  static const std::vector<std::uint32_t> labels{0, 0, 0, 0, 1, 1, 1, 1};
  static const Nodes nodes{std::span<const std::uint32_t>(labels)};
  return nodes;
}

double dense_s(Algorithm algorithm, std::uint64_t dimension, const NodeCosts& costs) {
  const SparseSumShape shape{.ranks = 8, .dimension = dimension};
  return SparseLevelCosts(shape, two_of_four(), kBetween, costs).dense_s(algorithm);
}

TEST("a ring is priced by what one rank of a node takes alone, where that is known") {
  constexpr std::uint64_t kN = 1 << 24;
  const double unknown_s = dense_s(Algorithm::ring, kN, {.inside = kInside});
  const double alone_s = dense_s(Algorithm::ring, kN, {.inside = kInside, .beta_alone_s_per_byte = 1e-9});
  EXPECT(alone_s < 0.3 * unknown_s && alone_s > 0.2 * unknown_s);
  // What a link carries of one rank in four is a fourth of what it carries of all, however fast that rank is.
  EXPECT(dense_s(Algorithm::ring, kN, {.inside = kInside, .beta_alone_s_per_byte = 0.0}) == alone_s);
}

TEST("of vectors on two levels what is inside hides behind what is between, but for the first segment and a port of both") {
  NetworkCosts inside = kInside;
  inside.beta_s_per_byte = kBetween.beta_s_per_byte / 6.0;
  const auto seconds = [&](std::uint64_t dimension, bool shares_memory) {
    return dense_s(Algorithm::two_level, dimension, {.inside = inside, .share_memory = shares_memory});
  };
  constexpr std::uint64_t kOneSegment = 1 << 18;
  EXPECT(seconds(32 * kOneSegment, true) < 0.75 * 32.0 * seconds(kOneSegment, true));
  EXPECT(seconds(32 * kOneSegment, false) > 0.9 * 32.0 * seconds(kOneSegment, false));
}

TEST("rounds that say nothing cost less where partners live together") {
  const SparseLevelCosts costs({.ranks = 8, .dimension = 1000}, two_of_four(), kBetween, {.inside = kInside});
  const auto near = [](double a, double b) { return a > 0.999 * b && a < 1.001 * b; };
  EXPECT(near(costs.empty_rounds_s(0), 2.0 * kInside.alpha_s + kBetween.alpha_s));
  EXPECT(near(costs.empty_rounds_s(1), kInside.alpha_s + kBetween.alpha_s));
  EXPECT(near(costs.empty_rounds_s(2), kBetween.alpha_s));
  EXPECT_EQ(costs.empty_rounds_s(3), 0.0);
}

TEST("vectors of an open sum are summed as a table says; two levels only where nodes are known") {
  const auto found = [](Algorithm named, std::optional<NetworkCosts> costs, const Nodes* nodes) {
    const AllreduceTable table = AllreduceTable(8, {{0, named}}).on_two_levels(true);
    const SparseChoice choice(table, costs, false, Overlaps{}, NodeCosts{.inside = kInside});
    return SparseDecision(choice, {.ranks = 8, .dimension = 1 << 20}, 0.0, false, nodes).dense_algorithm();
  };
  for (const auto& costs : {std::optional<NetworkCosts>(), std::optional(kBetween)}) {
    EXPECT(found(Algorithm::two_level, costs, &two_of_four()) == Algorithm::two_level);
    EXPECT(found(Algorithm::ring, costs, &two_of_four()) == Algorithm::ring);
    EXPECT(found(Algorithm::two_level, costs, nullptr) != Algorithm::two_level);
    EXPECT(found(Algorithm::recursive_doubling, costs, nullptr) == Algorithm::recursive_doubling);
  }
}

TEST("vectors that are quite full are summed as vectors on nodes, whatever their density") {
  const AllreduceTable table = AllreduceTable(8).on_two_levels(true);
  const SparseChoice choice(table, kBetween, false, Overlaps{}, NodeCosts{.inside = kInside, .share_memory = false});
  constexpr std::uint64_t kN = 1 << 18;
  const SparseDecision decision(choice, {.ranks = 8, .dimension = kN}, 0.0, false, &two_of_four());
  for (const double density : {0.6, 0.8, 0.95, 1.0}) {
    EXPECT(decision.alone(density * kN, false) == SparseVerdict::dense);
  }
}

}  // namespace
}  // namespace telegrad
