// Sums of sparse vectors whose algorithm is left open: right whatever the ranks come to, the same on all, and as predicted.
#include "testing.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/random.hpp"
#include "collectives/sparse/auto.hpp"
#include "collectives/sparse/choice.hpp"
#include "collectives/sparse/cost.hpp"
#include "session/reductions.hpp"
#include "simulation/measure.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr Rank kSizes[] = {2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 33};

struct Input {
  std::vector<std::uint32_t> indices;
  std::vector<float> values;
  SparseVector<float> vector(std::uint64_t n) const { return SparseVector<float>::sparse(n, indices, values); }
};

Input uniform(std::uint64_t n, double density, Random& random) {
  Input input;
  for (std::uint32_t i = 0; i < n; ++i) {
    if (random.uniform() >= density) continue;
    input.indices.push_back(i);
    input.values.push_back(static_cast<float>(random.below(7)) - 3.0F);
  }
  return input;
}

std::vector<float> sum_of(const std::vector<Input>& inputs, std::uint64_t n) {
  std::vector<float> sum(n);
  for (const Input& input : inputs) {
    for (std::size_t i = 0; i < input.indices.size(); ++i) sum[input.indices[i]] += input.values[i];
  }
  return sum;
}

// What it costs decides what a rank votes for, so these make it vote for one thing or another.
constexpr NetworkCosts kOnlyLatency{.alpha_s = 1.0, .beta_s_per_byte = 1e-15, .gamma_s_per_byte = 0.0};
constexpr NetworkCosts kOnlyBytes{.alpha_s = 1e-15, .beta_s_per_byte = 1.0, .gamma_s_per_byte = 0.0};
constexpr NetworkCosts kOnlyWork{.alpha_s = 1e-15, .beta_s_per_byte = 1e-15, .gamma_s_per_byte = 1.0};
constexpr NetworkCosts kBoth{.alpha_s = 1.0, .beta_s_per_byte = 1e-3, .gamma_s_per_byte = 0.0};

using Choices = std::vector<std::shared_ptr<SparseChoice>>;

// Of one rank. `overlap`: what it expects of its first sums.
std::shared_ptr<SparseChoice> choice_of(Rank size, NetworkCosts costs, double overlap = 0.0) {
  return std::make_shared<SparseChoice>(AllreduceTable(size), costs, true, Overlaps{.ranks = overlap});
}

Choices choices_of(Rank size, NetworkCosts costs) {
  Choices choices;
  for (Rank rank = 0; rank < size; ++rank) choices.push_back(choice_of(size, costs));
  return choices;
}

bool same_bits(const SparseVector<float>& a, const SparseVector<float>& b) {
  return a.is_dense() == b.is_dense() && std::ranges::equal(a.indices(), b.indices()) &&
         a.values().size() == b.values().size() &&
         (a.values().empty() || std::memcmp(a.values().data(), b.values().data(), a.values().size_bytes()) == 0);
}

void check(const std::vector<Input>& inputs, std::uint64_t n, const Choices& choices, std::uint64_t seed,
           World world = World::simulated) {
  const auto size = static_cast<Rank>(inputs.size());
  const std::vector<float> expected = sum_of(inputs, n);
  std::vector<std::shared_ptr<std::optional<SparseVector<float>>>> results;
  const auto how = [&](Rank rank) {
    return SparseReduction{.algorithm = Algorithm::automatic,
                           .wire = {.indices = rank % 2 == 0 ? IndexFormat::packed : IndexFormat::raw32,
                                    .packs_values = rank % 3 == 0},
                           .choice = choices[rank]};
  };
  const Ended ended = run_ranks(
      world, size,
      [&](Rank rank) {
        auto sum = make_all_reduce(inputs[rank].vector(n), how(rank));
        results.push_back(sum.result);
        return sum.request;
      },
      seed);
  REQUIRE(ended.all_succeeded());
  for (const auto& result : results) EXPECT(same_bits(**result, **results[0]));
  std::vector<float> dense(n);
  (**results[0]).write_dense(dense);
  EXPECT(dense == expected);

  std::vector<std::vector<float>> outputs(size, std::vector<float>(n, -77.0F));
  const Ended written = run_ranks(
      world, size,
      [&](Rank rank) { return make_all_reduce_into(inputs[rank].vector(n), std::span(outputs[rank]), how(rank)); }, seed);
  EXPECT(written.all_succeeded());
  for (const auto& output : outputs) EXPECT(output == expected);
}

TEST("whatever the costs: equal ranks, one rank full, one empty, all empty, ranks that know differently") {
  constexpr std::uint64_t kN = 1500;
  for (const World world : {World::simulated, World::local}) {
    for (const NetworkCosts costs : {kOnlyLatency, kOnlyBytes, kOnlyWork, kBoth}) {
      for (const Rank size : kSizes) {
        Random random(size);
        std::vector<Input> inputs(size);
        check(inputs, kN, choices_of(size, costs), 1, world);
        inputs[random.below(size)] = uniform(kN, 1.0, random);
        check(inputs, kN, choices_of(size, costs), 2, world);
        for (const double density : {0.003, 0.05, 0.7}) {
          for (Input& input : inputs) input = uniform(kN, density, random);
          check(inputs, kN, choices_of(size, costs), 3, world);
          inputs[random.below(size)] = {};
          inputs[random.below(size)] = uniform(kN, 1.0, random);
          Choices choices = choices_of(size, costs);
          choices[random.below(size)] = choice_of(size, costs, 1.0);
          check(inputs, kN, choices, 4, world);
        }
      }
    }
  }
}

TEST("any ranks may give up at any round, under any schedule") {
  constexpr std::uint64_t kN = 400;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const auto size = static_cast<Rank>(2 + random.below(15));
    std::vector<Input> inputs(size);
    for (Input& input : inputs) input = uniform(kN, std::pow(random.uniform(), 3.0), random);
    // Where both count, sums of a few entries are doubled, and those of many given up after a round or two.
    const double byte_s = std::exp2(-4.0 - static_cast<double>(random.below(10)));
    const double work_s = random.below(2) == 0 ? 0.0 : byte_s;
    const NetworkCosts costs{.alpha_s = 1.0, .beta_s_per_byte = byte_s, .gamma_s_per_byte = work_s};
    Choices choices;
    for (Rank rank = 0; rank < size; ++rank) choices.push_back(choice_of(size, costs, random.uniform()));
    check(inputs, kN, choices, seed);
  }
}

TEST("every reduction and dtype where all vote for a dense sum, and where they split") {
  constexpr std::uint64_t kN = 300;
  for (const Reduction reduction : {Reduction::sum, Reduction::avg, Reduction::prod, Reduction::min, Reduction::max,
                                    Reduction::max_abs}) {
    for (const NetworkCosts costs : {kOnlyBytes, kOnlyWork}) {
      const auto run = [&]<class V>(V) {
        for (const Rank size : {2U, 4U, 5U}) {
          const Choices choices = choices_of(size, costs);
          const auto sum_by = [&](Algorithm algorithm) {
            std::vector<std::shared_ptr<std::optional<SparseVector<V>>>> results;
            EXPECT(run_ranks(World::simulated, size, [&](Rank rank) {
                     Random random(rank + 1);
                     std::vector<std::uint32_t> indices;
                     std::vector<V> values;
                     for (std::uint32_t i = 0; i < kN; ++i) {
                       if (random.uniform() < 0.3) continue;
                       indices.push_back(i);
                       values.push_back(static_cast<V>(static_cast<float>(random.below(5)) - 2.0F));
                     }
                     auto sum = make_all_reduce(SparseVector<V>::sparse(kN, indices, values),
                                                {.reduction = reduction, .algorithm = algorithm, .choice = choices[rank]});
                     results.push_back(sum.result);
                     return sum.request;
                   }, 1).all_succeeded());
            std::vector<V> dense(kN);
            (**results[size - 1]).write_dense(dense, reduction);
            std::vector<float> floats;
            for (const V value : dense) floats.push_back(static_cast<float>(value));
            return floats;
          };
          EXPECT(sum_by(Algorithm::automatic) == sum_by(Algorithm::split_allgather));
        }
      };
      run(float{});
      run(double{});
      run(bf16{});
      run(f16{});
    }
  }
}

TEST("vectors that are borrowed stay as they are, whatever is chosen for them") {
  constexpr std::uint64_t kN = 5'000;
  for (const Rank size : {1U, 2U, 3U, 4U, 7U}) {
    std::vector<std::vector<float>> vectors;
    for (Rank rank = 0; rank < size; ++rank) {
      Random random(rank + 1);
      std::vector<float>& vector = vectors.emplace_back(kN);
      for (float& value : vector) value = static_cast<float>(random.below(7)) - 3.0F;
    }
    const std::vector<std::vector<float>> before = vectors;
    std::vector<float> sum(kN);
    for (const auto& vector : vectors) std::ranges::transform(sum, vector, sum.begin(), std::plus<>());
    for (const NetworkCosts costs : {kOnlyLatency, kOnlyBytes, kOnlyWork, kBoth}) {
      const Choices choices = choices_of(size, costs);
      std::vector<std::shared_ptr<std::optional<SparseVector<float>>>> results;
      EXPECT(run_ranks(World::simulated, size, [&](Rank rank) {
               auto begun = make_all_reduce(SparseVector<float>::borrow_dense(vectors[rank]),
                                            {.algorithm = Algorithm::automatic, .choice = choices[rank]});
               results.push_back(begun.result);
               return begun.request;
             }, 1).all_succeeded());
      EXPECT(vectors == before);
      for (Rank rank = 0; rank < size; ++rank) {
        const Array<float> values = (**results[rank]).take_values();
        EXPECT(std::ranges::equal(values.span(), sum) && values.data() != vectors[rank].data());
      }
    }
  }
}

TEST("a full sum goes by the dense algorithm, a short one in log2 P messages, and nobody asks twice") {
  const auto messages = [](std::uint64_t elements, std::uint64_t nnz) {
    const Measurement found = measure({.operation = Operation::sparse_allreduce,
                                       .ranks = 8,
                                       .bytes = elements * 4,
                                       .nnz = nnz,
                                       .costs = {.alpha_s = 1e-6, .beta_s_per_byte = 1e-10, .gamma_s_per_byte = 1e-10}});
    return *std::ranges::max_element(found.messages_sent);
  };
  EXPECT_EQ(messages(1'000'000, 10), 3U);            // the doubling alone
  EXPECT(messages(100'000, 99'000) >= 3U + 6U);      // votes, then two times log2 P rounds at least
  const auto bytes = [](Algorithm algorithm, std::uint64_t nnz) {
    return measure({.operation = Operation::sparse_allreduce,
                    .algorithm = algorithm,
                    .ranks = 8,
                    .bytes = 4'000'000,
                    .nnz = nnz,
                    .costs = {.alpha_s = 1e-9, .beta_s_per_byte = 1e-9, .gamma_s_per_byte = 0.0}})
        .bytes_sent[0];
  };
  EXPECT_EQ(bytes(Algorithm::automatic, 200'000), bytes(Algorithm::split_allgather, 200'000) + 3 * 8);
}

TEST("what earlier sums had in common changes the choice") {
  const auto finish_s = [](Algorithm algorithm, std::uint32_t calls) {
    return measure({.operation = Operation::sparse_allreduce,
                    .algorithm = algorithm,
                    .ranks = 8,
                    .bytes = 64'000'000,
                    .nnz = 100'000,
                    .overlap = 1.0,
                    .calls = calls,
                    .costs = {.alpha_s = 20e-6, .beta_s_per_byte = 8.5e-9}})
        .finish_s;
  };
  const double best_s = finish_s(Algorithm::split_allgather, 1);
  const double first_s = finish_s(Algorithm::automatic, 1);
  const double second_s = finish_s(Algorithm::automatic, 2) - first_s;
  EXPECT(first_s > 1.3 * best_s);  // taken for independent ones
  EXPECT(second_s < 1.02 * best_s);
}

// As measured on a host of two cores: see docs/results/algorithms.md.
TEST("between ranks that share memory what has filled in goes densely, sooner if the result is dense, and vectors as vectors") {
  constexpr std::uint64_t kN = std::uint64_t{4} << 20;
  constexpr NetworkCosts kMeasured{
      .alpha_s = 9e-6, .beta_s_per_byte = 7.5e-11, .beta_exchange_s_per_byte = 1.9e-10, .gamma_s_per_byte = 9.2e-11};
  for (const auto& costs : {std::optional<NetworkCosts>(), std::optional(kMeasured)}) {
    const SparseChoice choice(AllreduceTable(4), costs);
    const auto verdict = [&](double density, bool is_dense, bool into_dense, bool fills = true) {
      const SparseSumShape shape{
          .ranks = 4, .dimension = kN, .shares_memory = true, .fills = fills, .into_dense = into_dense};
      const SparseDecision decision(choice, shape, 0.0, true);
      return decision.alone(density * static_cast<double>(kN), is_dense);
    };
    EXPECT(verdict(0.01, false, false) == SparseVerdict::split);
    EXPECT(verdict(0.01, false, true) == SparseVerdict::split);
    EXPECT(verdict(0.05, false, false) == SparseVerdict::split);
    EXPECT(verdict(0.07, false, true) == SparseVerdict::filled);
    for (const double density : {0.2, 0.6, 1.0}) {
      EXPECT(verdict(density, false, false) == SparseVerdict::filled);
      EXPECT(verdict(density, false, true) == SparseVerdict::filled);
      EXPECT(verdict(density, false, true, false) != SparseVerdict::filled);
    }
    EXPECT(verdict(1.0, true, false) == SparseVerdict::dense);
  }
}

TEST("over a network what has filled in goes with marks where indices are longer, and vectors as vectors") {
  constexpr NetworkCosts kGigabit{.alpha_s = 20e-6, .beta_s_per_byte = 8.5e-9, .gamma_s_per_byte = 0.25e-9};
  const SparseChoice choice(AllreduceTable(4), kGigabit);
  const auto verdict = [&](double density, bool is_dense, bool packs, std::uint64_t n = std::uint64_t{4} << 20) {
    const SparseSumShape shape{.ranks = 4,
                               .dimension = n,
                               .indices = packs ? IndexFormat::packed : IndexFormat::none,
                               .packs_values = packs,
                               .fills = true};
    const SparseDecision decision(choice, shape, 0.0, false);
    return decision.alone(density * static_cast<double>(n), is_dense);
  };
  for (const bool packs : {false, true}) {
    EXPECT(verdict(0.01, false, packs) != SparseVerdict::filled);
    EXPECT(verdict(0.05, false, packs) != SparseVerdict::filled);
    EXPECT(verdict(0.6, false, packs, 60'000) != SparseVerdict::filled);
    EXPECT(verdict(1.0, true, packs) == SparseVerdict::dense);
  }
  for (const double density : {0.4, 0.6}) EXPECT(verdict(density, false, false) == SparseVerdict::filled);
}

// Those who have met must come to the same; of other nodes' memory they know nothing.
TEST("what ranks decide together does not depend on whether their own node shares memory") {
  constexpr std::uint32_t kLabels[] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  const Nodes with(kLabels, true);
  const Nodes without(kLabels, false);
  std::size_t gave_up = 0;
  for (const double inside_s : {1e-11, 1e-10, 1e-9}) {
    for (const bool measured : {false, true}) {
      std::optional<NodeCosts> node_costs;
      if (measured) node_costs = NodeCosts{.inside = {.alpha_s = 1e-7, .beta_s_per_byte = inside_s}};
      const NetworkCosts costs{.alpha_s = 1e-6, .beta_s_per_byte = 1e-9, .gamma_s_per_byte = inside_s};
      const SparseChoice choice(AllreduceTable(16).on_two_levels(true), costs, true, Overlaps{}, node_costs);
      for (std::uint64_t n = 1000; n < 100'000'000; n = n * 3 / 2) {
        const SparseSumShape shape{.ranks = 16, .dimension = n, .fills = true};
        const SparseDecision one(choice, shape, 0.0, false, &with);
        const SparseDecision other(choice, shape, 0.0, false, &without);
        for (const double density : {1e-4, 1e-3, 0.01, 0.1, 0.3}) {
          const double half = density * static_cast<double>(n);
          const SparseVerdict verdict = one.after(1, half, 1.8 * half);
          EXPECT(verdict == other.after(1, half, 1.8 * half));
          gave_up += verdict != SparseVerdict::go_on ? 1 : 0;
        }
      }
    }
  }
  EXPECT(gave_up > 100);
}

TEST("how sums grow, and back") {
  constexpr std::uint64_t kN = 1'000'000;
  EXPECT(std::abs(SumGrowth(kN, 10'000, 0.0).entries(8) - 1e6 * (1.0 - std::pow(0.99, 8.0))) < 1e-3);
  EXPECT(std::abs(SumGrowth(kN, 10'000, 1.0).entries(8) - 10'000) < 1e-6);
  for (const double overlap : {0.0, 0.2, 0.9, 1.0}) {
    const SumGrowth growth(kN, 10'000, overlap);
    EXPECT(std::abs(overlap_of(kN, 10'000, 8, growth.entries(8)) - overlap) < 1e-6);
    for (unsigned round = 1; round <= 3; ++round) {
      const SumGrowth seen =
          SumGrowth::seen(kN, growth.entries_doubled(round - 1), growth.entries_doubled(round), round);
      EXPECT(std::abs(seen.entries_doubled(6) - growth.entries_doubled(6)) < 1e-3);
      EXPECT(std::abs(seen.entries_doubled(0) - 10'000) < 1e-3);
    }
  }
  EXPECT(SumGrowth::seen(kN, 10'000, 20'000, 1).entries_doubled(1) <= 20'000.1);  // disjoint: fewer in common than chance
  EXPECT_EQ(SumGrowth::seen(kN, kN, kN, 2).entries_doubled(5), 1e6);
  EXPECT_EQ(SumGrowth(0, 0, 0.0).entries(4), 0.0);
  EXPECT_EQ(overlap_of(kN, 10'000, 8, 1e6), 0.0);
}

}  // namespace
