// Slices that hold about as many entries each: the bound holds for any distribution, all ranks cut alike, sums are right,
// and no owner gets everything.
#include "testing.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "collectives/sparse/balanced_slices.hpp"
#include "session/reductions.hpp"
#include "sparse_samples.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr World kWorlds[] = {World::simulated, World::local};
constexpr std::uint64_t kN = 1'000'000;

// Which indices a rank has.
using Pattern = std::function<std::vector<std::uint32_t>(Rank rank, Rank size, std::uint64_t n, Random& random)>;

std::vector<std::uint32_t> sorted(std::vector<std::uint32_t> indices) {
  std::ranges::sort(indices);
  const auto repeated = std::ranges::unique(indices);
  indices.erase(repeated.begin(), repeated.end());
  return indices;
}

std::vector<std::uint32_t> within(std::uint64_t begin, std::uint64_t end, std::size_t count, Random& random) {
  std::vector<std::uint32_t> indices;
  if (begin == end) return indices;
  for (std::size_t i = 0; i < count; ++i) indices.push_back(static_cast<std::uint32_t>(begin + random.below(end - begin)));
  return sorted(std::move(indices));
}

const Pattern kPatterns[] = {
    [](Rank, Rank, std::uint64_t n, Random& random) { return within(0, n, n / 100, random); },
    // All in what one rank would own.
    [](Rank, Rank size, std::uint64_t n, Random& random) { return within(0, n / size, n / 100, random); },
    // A narrow cluster, full.
    [](Rank, Rank, std::uint64_t n, Random&) {
      std::vector<std::uint32_t> indices(n / 500);
      std::iota(indices.begin(), indices.end(), static_cast<std::uint32_t>(n / 3));
      return indices;
    },
    // Each rank somewhere else.
    [](Rank rank, Rank size, std::uint64_t n, Random& random) {
      return within(n * rank / (size * size), n * (rank + 1) / (size * size), n / 200, random);
    },
    // Of very different numbers.
    [](Rank rank, Rank size, std::uint64_t n, Random& random) {
      return within(0, n, rank == size / 2 ? n / 20 : rank % 3, random);
    },
    // Zipf's law: few of high indices.
    [](Rank, Rank, std::uint64_t n, Random& random) {
      std::vector<std::uint32_t> indices;
      for (std::size_t i = 0; i < n / 100; ++i) {
        const double one = std::pow(static_cast<double>(n), random.uniform()) - 1.0;
        indices.push_back(static_cast<std::uint32_t>(one));
      }
      return sorted(std::move(indices));
    },
    // The same ones everywhere.
    [](Rank, Rank, std::uint64_t n, Random&) {
      Random same(5);
      return within(n / 2, n, n / 300, same);
    },
    // One entry, at the end.
    [](Rank, Rank, std::uint64_t n, Random&) {
      return n == 0 ? std::vector<std::uint32_t>() : std::vector<std::uint32_t>{static_cast<std::uint32_t>(n - 1)};
    },
    [](Rank, Rank, std::uint64_t, Random&) { return std::vector<std::uint32_t>(); },
};

std::vector<Input<float>> inputs_of(const Pattern& pattern, Rank size, std::uint64_t n) {
  std::vector<Input<float>> inputs(size);
  Random random(size);
  for (Rank rank = 0; rank < size; ++rank) {
    inputs[rank].indices = pattern(rank, size, n, random);
    for (std::size_t i = 0; i < inputs[rank].indices.size(); ++i) {
      inputs[rank].values.push_back(static_cast<float>(random.below(7)) - 3.0F);
    }
  }
  return inputs;
}

std::uint64_t entries_within(const std::vector<Input<float>>& inputs, Range range) {
  std::uint64_t entries = 0;
  for (const auto& input : inputs) {
    const auto first = std::ranges::lower_bound(input.indices, range.begin);
    entries += static_cast<std::uint64_t>(std::ranges::lower_bound(input.indices, range.end) - first);
  }
  return entries;
}

TEST("of any distribution no slice has more entries than the bound says, and all ranks cut alike") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 5U, 8U, 16U}) {
      for (const Pattern& pattern : kPatterns) {
        for (const std::uint64_t n : {std::uint64_t{0}, std::uint64_t{7}, kN}) {
          const std::vector<Input<float>> inputs = inputs_of(pattern, size, n);
          std::vector<std::optional<Partition>> found(size);
          const Ended ended = run_ranks(world, size, [&](Rank rank) {
            return std::make_shared<Request>(
                Call{.operation = Operation::sparse_allreduce}, [&, rank](Transport& net) -> Task<void> {
                  const SparseVector<float> mine = inputs[rank].vector(n);
                  found[rank].emplace(co_await balanced_slices(net, mine));
                });
          });
          REQUIRE(ended.all_succeeded());
          std::uint64_t total = 0;
          std::uint64_t steps = 0;
          for (const auto& input : inputs) {
            total += input.indices.size();
            steps += (input.indices.size() + samples_per_rank(size) - 1) / samples_per_rank(size);
          }
          EXPECT_EQ(found[0]->count(), n);
          for (Rank rank = 0; rank < size; ++rank) {
            EXPECT_EQ(found[rank]->digest(), found[0]->digest());
            const std::uint64_t entries = entries_within(inputs, (*found[0])[rank]);
            EXPECT(entries <= total / size + 1 + 2 * steps);
            EXPECT(static_cast<double>(entries) <= 1.25 * static_cast<double>(total) / size + 2.0 * size + 1.0);
          }
        }
      }
    }
  }
}

TEST("numbers beyond 32 bits") {
  constexpr std::uint64_t kMost = kDimensionMost;
  std::vector<std::uint32_t> low(8, 1000);
  std::vector<std::uint32_t> high(8);
  for (std::uint32_t i = 0; i < 8; ++i) high[i] = 0xfffffff0U + i;
  std::vector<IndexSamples> vectors(100'000, {kMost, low});
  vectors.resize(200'000, {kMost, high});
  const auto lengths = balanced_lengths(kMost, 65'536, vectors);
  EXPECT_EQ(std::accumulate(lengths.begin(), lengths.end(), std::uint64_t{0}), kMost);
  EXPECT_EQ(lengths[0], 0xfffffff0U);  // one index of half of all entries is one part's
  EXPECT(std::ranges::count(lengths, 0U) > 65'000);
}

TEST("samples that cannot be") {
  const std::vector<std::uint32_t> good{0, 3, 9};
  const std::vector<std::uint32_t> mixed{0, 9, 3};
  EXPECT_EQ(std::string(fault_of({3, good}, 10)), "");
  EXPECT_EQ(std::string(fault_of({0, mixed}, 10)), "");
  EXPECT_EQ(std::string(fault_of({11, good}, 10)), "there are more entries than elements");
  EXPECT_EQ(std::string(fault_of({3, mixed}, 10)), "the indices are not in order");
  EXPECT_EQ(std::string(fault_of({3, good}, 9)), "an index is outside of the vector");
}

TEST("sums over balanced slices are the same sums, by every algorithm that has slices") {
  constexpr std::uint64_t kShort = 20'000;
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 8U, 13U}) {
      for (const Pattern& pattern : kPatterns) {
        const std::vector<Input<float>> inputs = inputs_of(pattern, size, kShort);
        for (const Reduction reduction : {Reduction::sum, Reduction::max}) {
          const std::vector<float> expected = dense_result(inputs, kShort, reduction);
          for (const Algorithm algorithm :
               {Algorithm::split_allgather, Algorithm::split_dense_allgather, Algorithm::ring}) {
            std::vector<std::shared_ptr<std::optional<SparseVector<float>>>> results;
            const SparseReduction how{.reduction = reduction, .algorithm = algorithm, .slices = Slices::balanced};
            const Ended ended = run_ranks(
                world, size,
                [&](Rank rank) {
                  auto sum = make_all_reduce(inputs[rank].vector(kShort), how);
                  results.push_back(sum.result);
                  return sum.request;
                },
                size);
            REQUIRE(ended.all_succeeded());
            std::vector<float> dense(kShort);
            (*results[0])->write_dense(dense, reduction);
            EXPECT(dense == expected);
            for (const auto& result : results) EXPECT(same_bits(**result, **results[0]));
          }
        }
      }
    }
  }
}

std::uint64_t most_received(const std::vector<Input<float>>& inputs, std::uint64_t n, Slices slices) {
  const auto size = static_cast<Rank>(inputs.size());
  Simulation simulation(size, {});
  simulation.begin_all([&](Rank rank) {
    return make_all_reduce(inputs[rank].vector(n), SparseReduction{.wire = {.indices = IndexFormat::raw32},
                                                                   .slices = slices})
        .request;
  });
  EXPECT(!simulation.run().deadlock);
  std::uint64_t most = 0;
  for (Rank rank = 0; rank < size; ++rank) most = std::max(most, simulation.network().counts(rank).bytes_received);
  return most;
}

TEST("no rank receives more than its share, whatever the distribution; equal slices let one receive all") {
  for (const Rank size : {2U, 4U, 8U}) {
    for (const Pattern& pattern : kPatterns) {
      const std::vector<Input<float>> inputs = inputs_of(pattern, size, kN);
      std::uint64_t total = 0;
      std::vector<bool> held(kN);
      for (const auto& input : inputs) {
        total += input.indices.size();
        for (const std::uint32_t index : input.indices) held[index] = true;
      }
      const auto sum_entries = static_cast<std::uint64_t>(std::ranges::count(held, true));
      // The own slice's entries of all ranks, all others' slices of the sum, headers, samples.
      const std::uint64_t entries = total / size + total / (4 * size) + 2 * size + 1 + sum_entries;
      const std::uint64_t samples = size * (8 + 4 * samples_per_rank(size));
      EXPECT(most_received(inputs, kN, Slices::balanced) <= 8 * entries + 2 * size * 48 + samples);
    }
    const std::vector<Input<float>> clustered = inputs_of(kPatterns[1], size, kN);
    std::uint64_t others = 0;
    for (Rank rank = 1; rank < size; ++rank) others += clustered[rank].indices.size();
    EXPECT(most_received(clustered, kN, Slices::equal) >= 8 * others);
    if (size > 2) {
      EXPECT(most_received(clustered, kN, Slices::balanced) < most_received(clustered, kN, Slices::equal));
    }
  }
}

TEST("a narrow cluster that is full does not make the whole sum dense") {
  const std::vector<Input<float>> inputs = inputs_of(kPatterns[2], 4, kN);
  std::vector<std::shared_ptr<std::optional<SparseVector<float>>>> results;
  const Ended ended = run_ranks(World::simulated, 4, [&](Rank rank) {
    auto sum = make_all_reduce(inputs[rank].vector(kN), SparseReduction{.slices = Slices::balanced});
    results.push_back(sum.result);
    return sum.request;
  });
  EXPECT(ended.all_succeeded());
  EXPECT(!(**results[0]).is_dense());
  EXPECT(std::ranges::equal((**results[0]).indices(), inputs[0].indices));
}

TEST("a slice without an index does not make the whole sum dense") {
  std::vector<Input<float>> inputs(4);
  for (auto& input : inputs) input = {.indices = {7}, .values = {1.0F}};
  std::vector<std::shared_ptr<std::optional<SparseVector<float>>>> results;
  const Ended ended = run_ranks(World::simulated, 4, [&](Rank rank) {
    auto sum = make_all_reduce(inputs[rank].vector(10), SparseReduction{.slices = Slices::balanced});
    results.push_back(sum.result);
    return sum.request;
  });
  EXPECT(ended.all_succeeded());
  EXPECT(!(**results[0]).is_dense());
  EXPECT_EQ((**results[0]).nnz(), 1);
}

TEST("ranks of other slices do not agree") {
  const auto call_of = [](Slices slices) {
    return make_all_reduce(SparseVector<float>(100), SparseReduction{.slices = slices}).request->call();
  };
  EXPECT(call_of(Slices::balanced) != call_of(Slices::equal));
  EXPECT(describe(call_of(Slices::balanced)).find("slices=balanced") != std::string::npos);
  EXPECT(describe(call_of(Slices::equal)).find("slices") == std::string::npos);
}

}  // namespace
