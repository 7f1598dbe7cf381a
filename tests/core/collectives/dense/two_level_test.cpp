// The two-level allreduce, dense and sparse: right on every partition of the ranks into nodes, the same bits everywhere.
#include "testing.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/dense/allreduce_two_level.hpp"
#include "collectives/support/nodes.hpp"
#include "session/reductions.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

using Labels = std::vector<std::uint32_t>;

Labels in_blocks(std::initializer_list<std::uint32_t> sizes) {
  Labels labels;
  for (std::uint32_t node = 0; node < sizes.size(); ++node) labels.insert(labels.end(), sizes.begin()[node], node);
  return labels;
}

Labels dealt(Rank size, Rank nodes) {
  Labels labels;
  for (Rank rank = 0; rank < size; ++rank) labels.push_back(rank % nodes);
  return labels;
}

Labels drawn(Rank size, Rank nodes, std::uint64_t seed) {
  Random random(seed);
  Labels labels;
  for (Rank rank = 0; rank < size; ++rank) labels.push_back(static_cast<std::uint32_t>(random.below(nodes)) * 7);
  labels[0] = labels[1] = 0;  // some two together, some apart
  labels[2] = 7;
  return labels;
}

std::vector<Labels> partitions() {
  return {in_blocks({2, 1}),       in_blocks({1, 2}),       in_blocks({2, 2}),    dealt(4, 2),
          in_blocks({3, 2}),       in_blocks({1, 3, 1}),    dealt(6, 3),          in_blocks({4, 4}),
          dealt(8, 2),             in_blocks({2, 2, 2, 2}), in_blocks({5, 2, 6}), dealt(13, 4),
          in_blocks({8, 8}),       dealt(16, 4),            in_blocks({1, 1, 1, 13}),
          drawn(16, 5, 1),         drawn(11, 3, 2),         drawn(7, 2, 3)};
}

std::shared_ptr<const Nodes> nodes_of(const Labels& labels, bool memory) {
  return std::make_shared<const Nodes>(std::span(labels), memory);
}

std::string text_of(const Labels& labels) {
  std::string text;
  for (const std::uint32_t label : labels) text += std::to_string(label) + " ";
  return text;
}

float small_integer(Reduction reduction, Rank rank, std::size_t i) {
  if (reduction == Reduction::prod) return rank % 16 == i % 16 ? 2.0F : (rank + i) % 3 == 0 ? -1.0F : 1.0F;
  return static_cast<float>((rank * 5 + i * 3) % 7) - 3.0F;
}

template <class V>
V expected_result(Reduction reduction, Rank size, std::size_t i) {
  float result = small_integer(reduction, 0, i);
  for (Rank rank = 1; rank < size; ++rank) {
    const float value = small_integer(reduction, rank, i);
    switch (reduction) {
      case Reduction::prod: result *= value; break;
      case Reduction::min: result = std::min(result, value); break;
      case Reduction::max: result = std::max(result, value); break;
      case Reduction::max_abs:
        if (std::abs(result) <= std::abs(value)) result = result == -value ? std::abs(value) : value;
        break;
      default: result += value;
    }
  }
  if (reduction != Reduction::avg) return static_cast<V>(result);
  using Wide = std::conditional_t<std::is_same_v<V, double>, double, float>;
  return static_cast<V>(static_cast<Wide>(result) * (Wide{1} / static_cast<Wide>(size)));
}

template <class V>
void check_integers(World world, const Labels& labels, std::size_t count, Reduction reduction, bool in_place,
                    std::size_t part_bytes, std::uint64_t seed) {
  const auto size = static_cast<Rank>(labels.size());
  const auto nodes = nodes_of(labels, seed % 2 == 0);
  std::vector<std::vector<V>> inputs(size);
  std::vector<V> expected;
  for (std::size_t i = 0; i < count; ++i) expected.push_back(expected_result<V>(reduction, size, i));
  for (Rank rank = 0; rank < size; ++rank) {
    for (std::size_t i = 0; i < count; ++i) inputs[rank].push_back(static_cast<V>(small_integer(reduction, rank, i)));
  }
  const auto before = inputs;
  std::vector<std::vector<V>> outputs(in_place ? 0 : size, std::vector<V>(count, static_cast<V>(-99.0F)));
  auto& results = in_place ? inputs : outputs;
  const auto make = [&](Rank rank) {
    const Call call{.operation = Operation::allreduce, .dtype = dtype_of<V>, .reduction = reduction};
    return std::make_shared<Request>(call, [&, rank](Transport& net) {
      return allreduce_two_level(net, *nodes, dtype_of<V>, reduction, std::as_bytes(std::span(inputs[rank])),
                                 std::as_writable_bytes(std::span(results[rank])), {.part_bytes = part_bytes});
    });
  };
  EXPECT(run_ranks(world, size, make, seed).all_succeeded());
  for (Rank rank = 0; rank < size; ++rank) {
    if (results[rank] == expected && (in_place || inputs[rank] == before[rank])) continue;
    testing::fail(__FILE__, __LINE__, "rank " + std::to_string(rank) + ", nodes " + text_of(labels) + ", count " +
                                          std::to_string(count));
    return;
  }
}

constexpr World kWorlds[] = {World::simulated, World::local};
constexpr std::size_t kInOnePart = std::size_t{1} << 30;

TEST("two-level allreduce of integers is exact: partitions, worlds, lengths, one segment and many, in place and not") {
  for (const World world : kWorlds) {
    std::uint64_t seed = 0;
    for (const Labels& labels : partitions()) {
      for (const std::size_t count : {0, 1, 2, 63, 1000, 4099}) {
        ++seed;
        check_integers<float>(world, labels, count, Reduction::sum, seed % 2 == 0, kInOnePart, seed);
        check_integers<float>(world, labels, count, Reduction::avg, seed % 2 == 1, 256, seed + 1);
        if (count <= 63) check_integers<bf16>(world, labels, count, Reduction::sum, true, 8, seed + 2);
      }
    }
  }
}

TEST("every reduction of every dtype is exact on integers by two levels") {
  constexpr Reduction kReductions[] = {Reduction::sum, Reduction::avg, Reduction::prod,
                                       Reduction::min, Reduction::max, Reduction::max_abs};
  for (const World world : kWorlds) {
    for (const Labels& labels : {in_blocks({2, 2}), in_blocks({3, 2}), dealt(9, 3)}) {
      for (const Reduction reduction : kReductions) {
        const auto check = [&]<class V>(V) {
          check_integers<V>(world, labels, 333, reduction, labels.size() % 2 == 0, 128, labels.size());
        };
        check(float{});
        check(double{});
        check(bf16{});
        if (reduction == Reduction::avg) continue;  // of floats only; of f16 see half_averages_test: nodes average first
        check(f16{});
        check(std::int32_t{});
        check(std::int64_t{});
      }
    }
  }
}

TEST("two-level allreduce of arbitrary floats: the same bits on every rank, near the sum in doubles") {
  for (const World world : kWorlds) {
    for (const Labels& labels : partitions()) {
      constexpr std::size_t kCount = 777;
      const auto size = static_cast<Rank>(labels.size());
      const auto nodes = nodes_of(labels, true);
      Random random(size);
      std::vector<std::vector<float>> vectors(size);
      std::vector<double> sums(kCount, 0.0), magnitudes(kCount, 0.0);
      for (auto& vector : vectors) {
        for (std::size_t i = 0; i < kCount; ++i) {
          vector.push_back(static_cast<float>(random.uniform() - 0.5));
          sums[i] += static_cast<double>(vector[i]);
          magnitudes[i] += std::abs(static_cast<double>(vector[i]));
        }
      }
      const auto make = [&](Rank rank) {
        const Bytes mine = std::as_writable_bytes(std::span(vectors[rank]));
        return make_all_reduce(size, {.input = mine, .output = mine, .algorithm = Algorithm::two_level, .nodes = nodes});
      };
      EXPECT(run_ranks(world, size, make, 5).all_succeeded());
      for (Rank rank = 0; rank < size; ++rank) {
        EXPECT(std::memcmp(vectors[rank].data(), vectors[0].data(), kCount * sizeof(float)) == 0);
      }
      for (std::size_t i = 0; i < kCount; ++i) {
        EXPECT(std::abs(static_cast<double>(vectors[0][i]) - sums[i]) <= 1e-6 * magnitudes[i]);
      }
    }
  }
}

TEST("nodes are numbered by their first ranks, and slices by the smallest node") {
  const Labels labels{9, 4, 9, 4, 4};
  const Nodes nodes{std::span(labels)};
  EXPECT_EQ(nodes.count(), 2U);
  EXPECT_EQ(nodes.slices(), 2U);
  EXPECT_EQ(nodes.node_of(0), 0U);
  EXPECT_EQ(nodes.node_of(4), 1U);
  EXPECT_EQ(nodes.place_of(4), 2U);
  EXPECT(nodes.members(1) == (std::vector<Rank>{1, 3, 4}));
  EXPECT(nodes.owners(1) == (std::vector<Rank>{2, 3}));
  EXPECT(nodes.lengths(1, 5) == (std::vector<std::uint64_t>{3, 2, 0}));
  const Labels same{0, 7, 0, 7, 7}, other{0, 7, 7, 0, 7}, one{3, 3}, alone{1, 2};
  EXPECT_EQ(Nodes{std::span(same)}.digest(), nodes.digest());
  EXPECT(Nodes{std::span(other)}.digest() != nodes.digest());
  EXPECT(nodes.two_level());
  EXPECT(!Nodes{std::span(one)}.two_level());
  EXPECT(!Nodes{std::span(alone)}.two_level());
}

TEST("without two levels a named two_level is one of the others") {
  std::vector<float> values(64, 1.0F);
  const Bytes bytes = std::as_writable_bytes(std::span(values));
  for (const Labels& labels : {Labels{0, 0}, Labels{0, 1}}) {
    const auto request = make_all_reduce(
        Rank{2}, {.input = bytes, .output = bytes, .algorithm = Algorithm::two_level, .nodes = nodes_of(labels, false)});
    EXPECT(request->call().algorithm == Algorithm::recursive_doubling);
    EXPECT_EQ(request->call().layout, 0U);
  }
}

TEST("ranks that have other nodes do not call the same") {
  std::vector<std::vector<float>> vectors(4, std::vector<float>(16, 1.0F));
  const auto make = [&](Rank rank) {
    const Bytes mine = std::as_writable_bytes(std::span(vectors[rank]));
    const Labels labels = rank == 3 ? Labels{0, 1, 0, 1} : Labels{0, 0, 1, 1};
    return make_all_reduce(
        Rank{4}, {.input = mine, .output = mine, .algorithm = Algorithm::two_level, .nodes = nodes_of(labels, false)});
  };
  const Ended ended = run_ranks(World::simulated, 4, make);
  for (const auto& request : ended.requests) {
    EXPECT(request->done() && request->failure());
    if (!request->failure()) continue;
    EXPECT(request->failure()->kind == FailureKind::mismatched_call);
    EXPECT(request->failure()->reason.find("nodes=#") != std::string::npos);
  }
}

// Of a rank: `density` of the indices, in a pattern of its own, with small integers.
template <class V>
SparseVector<V> vector_of(Rank rank, std::uint64_t dimension, double density, std::vector<double>& sum,
                          std::vector<int>& ranks_with) {
  Random random(rank + 17);
  std::vector<std::uint32_t> indices;
  std::vector<V> values;
  for (std::uint64_t i = 0; i < dimension; ++i) {
    if (random.uniform() >= density) continue;
    const auto value = static_cast<float>(static_cast<int>(random.below(13)) - 6);
    indices.push_back(static_cast<std::uint32_t>(i));
    values.push_back(static_cast<V>(value));
    sum[i] += static_cast<double>(value);
    ++ranks_with[i];
  }
  return SparseVector<V>::sparse(dimension, indices, std::span<const V>(values));
}

template <class V>
void check_sparse(World world, const Labels& labels, std::uint64_t dimension, double density, Reduction reduction,
                  bool into, SparseReduction how, double tolerance = 0.0,
                  Algorithm algorithm = Algorithm::two_level, std::array<double, 3> shares = {1.0, 1.0, 1.0}) {
  const auto size = static_cast<Rank>(labels.size());
  how.reduction = reduction;
  how.algorithm = algorithm;
  std::vector<double> sum(dimension, 0.0);
  std::vector<int> ranks_with(dimension, 0);
  std::vector<SparseSum<V>> sums(size);
  std::vector<std::vector<V>> outputs(size, std::vector<V>(dimension, static_cast<V>(-99.0F)));
  std::vector<SparseVector<V>> vectors;
  for (Rank rank = 0; rank < size; ++rank) {
    vectors.push_back(vector_of<V>(rank, dimension, shares[rank % 3] * density, sum, ranks_with));
  }
  const auto make = [&](Rank rank) -> RequestPtr {
    SparseReduction own = how;
    // Each knows of its own node alone.
    if (!how.nodes) own.nodes = nodes_of(labels, labels[rank] % 2 == 0);
    if (how.choice) {
      own.choice = std::make_shared<SparseChoice>(how.choice->dense(), how.choice->costs(), how.choice->fills(), Overlaps{},
                                                  how.choice->node_costs());
    }
    if (into) return make_all_reduce_into(std::move(vectors[rank]), std::span<V>(outputs[rank]), own);
    sums[rank] = make_all_reduce(std::move(vectors[rank]), own);
    return sums[rank].request;
  };
  EXPECT(run_ranks(world, size, make, size).all_succeeded());
  for (Rank rank = 0; rank < size; ++rank) {
    if (!into) {
      EXPECT(sums[rank].result->has_value());
      if (!sums[rank].result->has_value()) return;
      (*sums[rank].result)->write_dense(outputs[rank], reduction);
      EXPECT_EQ((*sums[rank].result)->is_dense(), (*sums[0].result)->is_dense());
    }
    EXPECT(dimension == 0 || std::memcmp(outputs[rank].data(), outputs[0].data(), dimension * sizeof(V)) == 0);
  }
  for (std::uint64_t i = 0; i < dimension; ++i) {
    const double expected = reduction == Reduction::avg ? sum[i] / size : sum[i];
    const auto found = static_cast<double>(static_cast<float>(outputs[0][i]));
    const auto exact = static_cast<double>(static_cast<float>(static_cast<V>(static_cast<float>(expected))));
    if (std::abs(found - exact) <= tolerance * std::max(1.0, std::abs(exact)) + (reduction == Reduction::avg ? 0.01 : 0.0)) {
      continue;
    }
    testing::fail(__FILE__, __LINE__, "nodes " + text_of(labels) + ", dimension " + std::to_string(dimension) + ", at " +
                                          std::to_string(i) + ": " + std::to_string(found) + ", not " +
                                          std::to_string(exact));
    return;
  }
}

TEST("two-level sums of sparse vectors are exact: partitions, worlds, lengths, densities, formats, to vectors and dense") {
  for (const World world : kWorlds) {
    std::size_t number = 0;
    for (const Labels& labels : partitions()) {
      for (const std::uint64_t dimension : {0U, 1U, 5U, 1000U, 4099U}) {
        for (const double density : {0.0, 0.01, 0.3, 1.0}) {
          SparseReduction how;
          how.wire.indices = ++number % 3 == 0 ? IndexFormat::packed : IndexFormat::none;
          how.wire.packs_values = number % 3 == 0;
          check_sparse<float>(world, labels, dimension, density, number % 4 == 0 ? Reduction::avg : Reduction::sum,
                              number % 2 == 0, how);
        }
      }
      check_sparse<double>(world, labels, 700, 0.05, Reduction::sum, false, {});
      check_sparse<bf16>(world, labels, 700, 0.05, Reduction::sum, true, {});
      check_sparse<f16>(world, labels, 700, 0.05, Reduction::sum, false, {});
    }
  }
}

TEST("two-level sums of values that are rounded between nodes: near, and the same bits on all ranks") {
  for (const World world : kWorlds) {
    for (const Labels& labels : {in_blocks({2, 2}), dealt(6, 3), in_blocks({3, 1, 2})}) {
      SparseReduction how;
      how.wire.values = ValueEncoding::bf16;
      check_sparse<float>(world, labels, 1000, 0.1, Reduction::sum, false, how, 0.02);
    }
  }
}

TEST("two-level sums of long slices are exact between ranks that share memory, whatever is said of their nodes") {
  for (const bool memory : {false, true}) {
    SparseReduction how;
    how.nodes = nodes_of(in_blocks({3, 3}), memory);
    for (const bool into : {false, true}) {
      check_sparse<float>(World::memory, in_blocks({3, 3}), 1'500'000, 0.1, Reduction::sum, into, how);
    }
  }
}

TEST("without two levels a sparse two_level is automatic") {
  SparseReduction how;
  how.algorithm = Algorithm::two_level;
  EXPECT(make_all_reduce(SparseVector<float>(5), how).request->call().algorithm == Algorithm::automatic);
  const Labels one{1, 1};
  how.nodes = nodes_of(one, true);
  EXPECT(make_all_reduce(SparseVector<float>(5), how).request->call().algorithm == Algorithm::automatic);
  const Labels two{1, 1, 2};
  how.nodes = nodes_of(two, true);
  const auto call = make_all_reduce(SparseVector<float>(5), how).request->call();
  EXPECT(call.algorithm == Algorithm::two_level);
  EXPECT_EQ(call.layout, how.nodes->digest());
}

TEST("an open sum of vectors may go on two levels where a dense one of that length does") {
  constexpr std::uint64_t kLong = 1 << 20;
  const Labels labels{0, 0, 1, 1};
  const auto knows_nodes = [&](const AllreduceTable& table, std::uint64_t dimension, Slices slices, Labels ranks,
                               std::optional<NodeCosts> costs = {}, ValueEncoding values = ValueEncoding::native) {
    SparseReduction how;
    how.algorithm = Algorithm::automatic;
    how.slices = slices;
    how.nodes = nodes_of(ranks, true);
    how.choice = std::make_shared<SparseChoice>(table, std::nullopt, true, Overlaps{}, costs);
    how.wire.values = values;
    std::vector<float> output(dimension);
    const auto call = make_all_reduce(SparseVector<float>(dimension), how).request->call();
    const auto into = make_all_reduce_into(SparseVector<float>(dimension), std::span(output), how)->call();
    EXPECT(call.algorithm == Algorithm::automatic && into.algorithm == Algorithm::automatic);
    EXPECT_EQ(call.layout, into.layout);
    return call.layout == how.nodes->digest();
  };
  const AllreduceTable levels = AllreduceTable(4).on_two_levels(true);
  EXPECT(knows_nodes(levels, kLong, Slices::equal, labels));
  EXPECT(!knows_nodes(levels, 16, Slices::equal, labels));
  EXPECT(!knows_nodes(levels, kLong, Slices::balanced, labels));
  EXPECT(!knows_nodes(levels, kLong, Slices::equal, {0, 0, 0, 0}));
  EXPECT(!knows_nodes(AllreduceTable(4), kLong, Slices::equal, labels));
  const AllreduceTable ring(4, {{0, Algorithm::ring}});
  EXPECT(!knows_nodes(ring.on_two_levels(true), kLong, Slices::equal, labels));
  // Costs tell more than the table does; but what is rounded compares none.
  EXPECT(knows_nodes(ring.on_two_levels(true), kLong, Slices::equal, labels, NodeCosts{}));
  EXPECT(knows_nodes(levels, 16, Slices::equal, labels, NodeCosts{}));
  EXPECT(!knows_nodes(ring.on_two_levels(true), kLong, Slices::balanced, labels, NodeCosts{}));
  EXPECT(!knows_nodes(ring.on_two_levels(true), kLong, Slices::equal, labels, NodeCosts{}, ValueEncoding::bf16));
  EXPECT(!knows_nodes(ring.on_two_levels(true), kLong, Slices::equal, {0, 0, 0, 0}, NodeCosts{}));
}

TEST("open sums on nodes are exact, whatever they come to: few entries and many, vectors and dense") {
  const auto choice_of = [](const Labels& labels) {
    const AllreduceTable table(static_cast<Rank>(labels.size()), {{0, Algorithm::two_level}});
    return std::make_shared<SparseChoice>(table.on_two_levels(true));
  };
  for (const World world : kWorlds) {
    for (const Labels& labels : partitions()) {
      for (const double density : {0.0, 0.001, 0.3, 1.0}) {
        SparseReduction how;
        how.choice = choice_of(labels);
        check_sparse<float>(world, labels, 20'000, density, Reduction::sum, density == 0.3, how, 0.0,
                            Algorithm::automatic);
      }
    }
    SparseReduction rounding;
    rounding.wire.values = ValueEncoding::bf16;
    rounding.choice = choice_of(dealt(6, 3));
    check_sparse<float>(world, dealt(6, 3), 1000, 0.1, Reduction::avg, true, rounding, 0.02, Algorithm::automatic);
  }
}

constexpr NetworkCosts kBetween{.alpha_s = 1e-9, .beta_s_per_byte = 1e-9, .gamma_s_per_byte = 5e-10};

// A message inside of a node costs `inside_factor` of one between nodes.
std::shared_ptr<SparseChoice> choice_on(const Nodes& nodes, double inside_factor, bool fills) {
  const NetworkCosts inside{.alpha_s = kBetween.alpha_s * inside_factor,
                            .beta_s_per_byte = kBetween.beta_s_per_byte * inside_factor,
                            .gamma_s_per_byte = kBetween.gamma_s_per_byte};
  return std::make_shared<SparseChoice>(AllreduceTable(nodes.ranks()).on_two_levels(true), kBetween, fills, Overlaps{},
                                        NodeCosts{.inside = inside});
}

SparseDecision decision_on(const Nodes& nodes, double inside_factor, std::uint64_t dimension, bool fills = true) {
  const SparseSumShape shape{.ranks = nodes.ranks(), .dimension = dimension, .fills = fills};
  return {*choice_on(nodes, inside_factor, fills), shape, 0.0, false, &nodes};
}

// Where messages inside of nodes are as dear as between them, nothing is gained by adding there first.
TEST("open sums on nodes go by slices of all ranks where these are the faster, and are exact, whatever each rank holds") {
  constexpr std::uint64_t kN = 60'000;
  for (const Labels& labels : {in_blocks({4, 4}), dealt(8, 2), in_blocks({3, 3, 3}), in_blocks({2, 1, 4})}) {
    const auto nodes = nodes_of(labels, false);
    const auto verdict = [&](double inside_factor, double density) {
      return decision_on(*nodes, inside_factor, kN).alone(density * kN, false);
    };
    EXPECT(verdict(1.0, 0.0) == SparseVerdict::go_on);
    EXPECT(verdict(1.0, 0.1) == SparseVerdict::flat_split);
    if (nodes->alike()) EXPECT(verdict(0.01, 0.02) == SparseVerdict::split);
    for (const World world : kWorlds) {
      for (const bool into : {false, true}) {
        for (const auto& shares : {std::array{1.0, 1.0, 1.0}, std::array{1.0, 0.0, 1.0}, std::array{0.0, 0.0, 3.0}}) {
          SparseReduction how;
          how.choice = choice_on(*nodes, 1.0, true);
          check_sparse<float>(world, labels, kN, 0.1, Reduction::sum, into, how, 0.0, Algorithm::automatic, shares);
        }
      }
    }
  }
}

TEST("open sums of nearly full vectors on nodes are sums of vectors on two levels, and exact") {
  constexpr std::uint64_t kN = 60'000;
  for (const Labels& labels : {in_blocks({4, 4}), dealt(8, 2), in_blocks({3, 3, 3}), in_blocks({2, 1, 4})}) {
    const auto nodes = nodes_of(labels, false);
    const SparseDecision decision = decision_on(*nodes, 0.01, kN, false);
    if (nodes->alike()) {
      EXPECT(decision.dense_algorithm() == Algorithm::two_level);
      EXPECT(decision.alone(0.9 * kN, false) == SparseVerdict::dense);
    }
    EXPECT(decision_on(*nodes, 1e3, kN, false).dense_algorithm() != Algorithm::two_level);
    for (const World world : kWorlds) {
      for (const bool into : {false, true}) {
        for (const Reduction reduction : {Reduction::sum, Reduction::avg}) {
          SparseReduction how;
          how.choice = choice_on(*nodes, 0.01, false);
          check_sparse<float>(world, labels, kN, 0.9, reduction, into, how, 0.0, Algorithm::automatic);
        }
      }
    }
  }
}

}  // namespace
