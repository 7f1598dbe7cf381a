// Sparse reduce_scatter: each rank gets its slice of the sum, for slices of any lengths; few bytes.
#include "testing.hpp"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "codec/wire.hpp"
#include "session/reductions.hpp"
#include "sparse_samples.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr Rank kSizes[] = {1, 2, 3, 4, 5, 7, 8, 13, 16, 33};
constexpr World kWorlds[] = {World::simulated, World::local};
constexpr IndexFormat kFormats[] = {IndexFormat::none, IndexFormat::raw32, IndexFormat::packed};

// Of the `pattern`-th kind, n in all.
Partition slices_of(Rank size, std::uint64_t n, int pattern) {
  if (pattern == 0) return {static_cast<std::size_t>(n), size};
  std::vector<std::uint64_t> lengths(size);
  std::uint64_t left = n;
  for (Rank rank = 0; rank + 1 < size; ++rank) {
    const std::uint64_t wished = pattern == 1 ? (rank == size / 2 ? n : 0) : (rank * 7 + 1) % 4 * n / (2 * size);
    lengths[rank] = std::min(left, wished);
    left -= lengths[rank];
  }
  lengths[size - 1] = left;
  return Partition{std::span<const std::uint64_t>(lengths)};
}

template <class V>
using Result = std::shared_ptr<std::optional<SparseVector<V>>>;

template <class V>
void check(World world, const std::vector<Input<V>>& inputs, std::uint64_t n, const Partition& slices,
           Reduction reduction, double factor, std::uint64_t seed) {
  const auto size = static_cast<Rank>(inputs.size());
  const SparseReduction how{.reduction = reduction,
                            .switch_factor = factor,
                            .wire = {.indices = kFormats[seed % std::size(kFormats)], .packs_values = seed / 3 % 2 == 0}};
  std::vector<Result<V>> results;
  const Ended ended = run_ranks(
      world, size,
      [&](Rank rank) {
        auto sum = make_reduce_scatter(inputs[rank].vector(n), slices, how);
        results.push_back(sum.result);
        return sum.request;
      },
      seed);
  REQUIRE(ended.all_succeeded());
  const std::vector<float> expected = dense_result(inputs, n, reduction);
  std::vector<bool> held(n);
  for (const auto& input : inputs) {
    for (const std::uint32_t index : input.indices) held[index] = true;
  }
  for (Rank rank = 0; rank < size; ++rank) {
    const SparseVector<V>& mine = **results[rank];
    EXPECT_EQ(mine.dimension(), n);
    EXPECT(!mine.is_dense());
    const Range slice = slices[rank];
    for (const std::uint32_t index : mine.indices()) EXPECT(index >= slice.begin && index < slice.end && held[index]);
    std::vector<V> dense(n);
    mine.write_dense(dense, reduction);
    std::vector<float> right(n, neutral(reduction));
    std::copy(expected.begin() + static_cast<std::ptrdiff_t>(slice.begin),
              expected.begin() + static_cast<std::ptrdiff_t>(slice.end),
              right.begin() + static_cast<std::ptrdiff_t>(slice.begin));
    EXPECT(as_floats(std::span<const V>(dense)) == right);
  }
}

TEST("each rank gets its slice of the sum: every world, P, density and type, and slices of any lengths") {
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      for (const std::uint64_t n : {0UL, 1UL, 63UL, 3000UL}) {
        for (const double density : {0.0, 0.02, 0.4, 1.0}) {
          for (int pattern = 0; pattern < 3; ++pattern) {
            Random random(size * 1000 + n);
            std::vector<Input<float>> inputs;
            std::vector<Input<bf16>> halves;
            for (Rank rank = 0; rank < size; ++rank) {
              inputs.push_back(uniform<float>(n, density, random));
              halves.push_back(uniform<bf16>(n, density, random));
            }
            const Partition slices = slices_of(size, n, pattern);
            check(world, inputs, n, slices, Reduction::sum, 1.0, size);
            if (size < 8) check(world, halves, n, slices, Reduction::avg, 1.0, size + 1);
          }
        }
      }
    }
  }
}

TEST("every reduction of every dtype, whether slices go dense or not") {
  constexpr Reduction kReductions[] = {Reduction::sum, Reduction::avg, Reduction::prod,
                                       Reduction::min, Reduction::max, Reduction::max_abs};
  for (const Rank size : {1U, 3U, 4U}) {
    for (const double factor : {0.0, 1.0, 1e6}) {
      for (const Reduction reduction : kReductions) {
        const auto run = [&]<class V>(V) {
          Random random(size);
          std::vector<Input<V>> inputs;
          for (Rank rank = 0; rank < size; ++rank) inputs.push_back(uniform<V>(700, 0.3, random));
          check(World::simulated, inputs, 700, slices_of(size, 700, 2), reduction, factor, size);
        };
        run(float{});
        run(double{});
        run(bf16{});
        run(f16{});
      }
    }
  }
}

TEST("a slice that never went dense keeps the entries whose sum is zero") {
  Input<float> plus{.indices = {3, 8}, .values = {2.0F, 1.0F}};
  Input<float> minus{.indices = {3}, .values = {-2.0F}};
  std::vector<Result<float>> results;
  const Ended ended = run_ranks(World::simulated, 2, [&](Rank rank) {
    auto sum = make_reduce_scatter((rank == 0 ? plus : minus).vector(100), Partition(100, 2), {});
    results.push_back(sum.result);
    return sum.request;
  });
  EXPECT(ended.all_succeeded());
  EXPECT(std::ranges::equal((**results[0]).indices(), plus.indices));
  EXPECT((**results[0]).values()[0] == 0.0F && (**results[0]).values()[1] == 1.0F);
  EXPECT_EQ((**results[1]).nnz(), 0U);
}

TEST("a long sum, reduced in parts") {
  constexpr std::uint64_t kN = 2'000'000;
  Random random(9);
  std::vector<Input<float>> inputs;
  for (Rank rank = 0; rank < 3; ++rank) inputs.push_back(uniform<float>(kN, 0.05 * (1 + rank), random));
  check(World::simulated, inputs, kN, slices_of(3, kN, 0), Reduction::sum, 1.0, 1);
  check(World::local, inputs, kN, slices_of(3, kN, 2), Reduction::avg, 1.0, 2);
}

TEST("a rank sends others the entries of their slices, and nothing else") {
  constexpr std::uint64_t kN = 100'000;
  for (const Rank size : {2U, 5U, 8U}) {
    for (int pattern = 0; pattern < 3; ++pattern) {
      const Partition slices = slices_of(size, kN, pattern);
      Random random(size);
      std::vector<Input<float>> inputs;
      for (Rank rank = 0; rank < size; ++rank) inputs.push_back(uniform<float>(kN, 0.01, random));
      Simulation simulation(size, {});
      simulation.begin_all([&](Rank rank) {
        return make_reduce_scatter(inputs[rank].vector(kN), slices, SparseReduction{}).request;
      });
      EXPECT(!simulation.run().deadlock);
      const auto share_bytes = [&](Rank source, Rank owner) {
        return encoded_size(inputs[source].vector(kN).slice(slices[owner].begin, slices[owner].end));
      };
      for (Rank rank = 0; rank < size; ++rank) {
        std::uint64_t sent = 0;
        std::uint64_t received = 0;
        for (Rank other = 0; other < size; ++other) {
          if (other == rank) continue;
          sent += share_bytes(rank, other);
          received += share_bytes(other, rank);
        }
        const SimCounts& counts = simulation.network().counts(rank);
        EXPECT_EQ(counts.bytes_sent, sent);
        EXPECT_EQ(counts.bytes_received, received);
        EXPECT_EQ(counts.messages_sent, size - 1);
      }
    }
  }
}

TEST("no rank is through before all have called") {
  for (const World world : kWorlds) {
    for (Rank absent = 0; absent < 4; ++absent) {
      std::vector<Result<float>> results;
      const Ended ended = run_ranks(world, 4, [&](Rank rank) -> RequestPtr {
        if (rank == absent) return nullptr;
        auto sum = make_reduce_scatter(SparseVector<float>(100), Partition(100, 4), {});
        results.push_back(sum.result);
        return sum.request;
      });
      EXPECT(ended.stuck);
      for (const auto& result : results) EXPECT(!result->has_value());
    }
  }
}

TEST("slices of other lengths are another call, slices that are alike are not") {
  const auto layout_of = [](const Partition& slices) {
    return make_reduce_scatter(SparseVector<float>(100), slices, {}).request->call().layout;
  };
  EXPECT_EQ(layout_of(slices_of(4, 100, 0)), layout_of(Partition{std::span<const std::uint64_t>({25, 25, 25, 25})}));
  EXPECT(layout_of(slices_of(4, 100, 1)) != layout_of(slices_of(4, 100, 0)));
  EXPECT(layout_of(slices_of(4, 100, 1)) != layout_of(slices_of(4, 100, 2)));
}

}  // namespace
