// Ok-Topk: the k largest of the sum, the same bits everywhere; what has no part in the sum is handed back.
#include "testing.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "collectives/dense/allgather_bruck.hpp"
#include "collectives/sparse/split.hpp"
#include "collectives/support/allgather_short.hpp"
#include "collectives/support/any_size.hpp"
#include "collectives/topk/pooled_slices.hpp"
#include "oktopk_calls.hpp"
#include "topk_training.hpp"

namespace {

using namespace telegrad;

TEST("the k largest of the sum: every world, P, length, density and k") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 4U, 5U, 7U, 8U, 13U, 16U, 33U}) {
      for (const std::uint64_t n : {0UL, 1UL, 63UL, 3000UL}) {
        for (const double density : {0.0, 0.02, 1.0}) {
          for (const std::uint64_t k : {1UL, 30UL, 5000UL}) {
            if (size > 8 && world == World::local && n == 63) continue;
            Random random(size * 1000 + n + k);
            std::vector<Input<float>> inputs;
            for (Rank rank = 0; rank < size; ++rank) inputs.push_back(normal<float>(n, density, random));
            const OkTopkSettings settings{.k = k};
            const auto results = call(world, inputs, n, settings, {}, Reduction::sum, IndexFormat::packed, size);
            check_call(inputs, n, settings, Reduction::sum, results);
            EXPECT(results[0].report.cut && results[0].report.exact);
          }
        }
      }
    }
  }
}

TEST("every dtype, sum and mean, and every format of indices; ties are all kept") {
  const auto run = [&]<class V>(V) {
    for (const Rank size : {1U, 3U, 4U, 6U}) {
      for (const Reduction reduction : {Reduction::sum, Reduction::avg}) {
        for (const IndexFormat indices : {IndexFormat::none, IndexFormat::raw32, IndexFormat::packed}) {
          Random random(size);
          std::vector<Input<V>> inputs;
          std::vector<Input<V>> tied;
          for (Rank rank = 0; rank < size; ++rank) {
            inputs.push_back(normal<V>(2000, 0.05, random));
            tied.push_back(uniform<V>(2000, 0.05, random));
          }
          const OkTopkSettings settings{.k = 60};
          check_call(inputs, 2000, settings, reduction, call(World::local, inputs, 2000, settings, {}, reduction, indices));
          const auto results = call(World::simulated, tied, 2000, settings, {}, reduction, indices);
          check_call(tied, 2000, settings, reduction, results);
          EXPECT(results[0].report.selected > 60);
        }
      }
    }
  };
  run(float{});
  run(double{});
  run(bf16{});
  run(f16{});
}

TEST("as published, also where some slices have no index") {
  for (const World world : kWorlds) {
    for (const std::uint64_t n : {0UL, 1UL, 3UL, 40UL}) {
      Random random(n);
      std::vector<Input<float>> inputs;
      for (Rank rank = 0; rank < 5; ++rank) inputs.push_back(normal<float>(n, 0.6, random));
      const OkTopkSettings settings{.k = 4, .as_published = true};
      const auto results = call(world, inputs, n, settings, {});
      for (const auto& result : results) {
        EXPECT(same_bits(result.sum, largest(sum_of(inputs, Reduction::sum), 4).vector(n)));
      }
    }
  }
}

TEST("long shares go in buckets") {
  constexpr std::uint64_t kN = 3'000'000;
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 5U}) {
      Random random(size);
      std::vector<Input<float>> inputs;
      for (Rank rank = 0; rank < size; ++rank) inputs.push_back(normal<float>(kN, rank == 1 ? 0.01 : 0.1, random));
      const OkTopkSettings settings{.k = 200'000};
      const auto results = call(world, inputs, kN, settings, {}, Reduction::sum, IndexFormat::packed, size);
      check_call(inputs, kN, settings, Reduction::sum, results);
    }
  }
}

TEST("what ranks hold and what the sums have taken is all there ever was, and sums keep about k") {
  for (const Rank size : {1U, 3U, 4U, 8U}) {
    constexpr std::uint64_t kKept = 120;
    const OkTopkSettings settings{.k = kKept, .boundaries_every = 10, .threshold_every = 8};
    Training training(size);
    Random random(size);
    OkTopkState state;
    double deviation = 0.0;
    int exact = 0;
    constexpr int kCalls = 50;
    for (int time = 0; time < kCalls; ++time) {
      const auto inputs = training.select(time, kKept, random);
      const std::vector<double> before = training.totals(inputs);
      const auto results = call(World::local, inputs, Training::kN, settings, state);
      check_call(inputs, Training::kN, settings, Reduction::sum, results);
      EXPECT(training.give_back(results, before));
      state = results[0].state;
      const double relative = static_cast<double>(results[0].report.selected) / kKept - 1.0;
      EXPECT(relative <= 0.25);
      deviation += std::abs(relative) / kCalls;
      exact += results[0].report.exact ? 1 : 0;
    }
    EXPECT(deviation < 0.11);
    EXPECT(exact < kCalls);
  }
}

TEST("ranks of other settings, or with another past, do not call the same") {
  const auto layout_of = [](const OkTopkSettings& settings, const OkTopkState& state) {
    return make_all_reduce_topk(SparseVector<float>(100), settings, state, Reduction::sum, {}).request->call().layout;
  };
  const OkTopkSettings settings{.k = 5};
  const std::uint64_t first = layout_of(settings, {});
  EXPECT_EQ(first, layout_of({.k = 5}, {}));
  for (const OkTopkSettings& other :
       {OkTopkSettings{.k = 6}, OkTopkSettings{.k = 5, .boundaries_every = 63},
        OkTopkSettings{.k = 5, .threshold_every = 31}, OkTopkSettings{.k = 5, .balance_factor = 3.0},
        OkTopkSettings{.k = 5, .as_published = true}}) {
    EXPECT(layout_of(other, {}) != first);
  }
  for (const OkTopkState& other : {OkTopkState{.calls = 1}, OkTopkState{.threshold = 0.5}, OkTopkState{.lengths = {50, 50}}}) {
    EXPECT(layout_of(settings, other) != first);
  }
}

TEST("no rank is through before all have called") {
  for (const World world : kWorlds) {
    for (Rank absent = 0; absent < 4; ++absent) {
      std::vector<std::shared_ptr<std::optional<OkTopkSum<float>>>> results;
      const Ended ended = run_ranks(world, 4, [&](Rank rank) -> RequestPtr {
        if (rank == absent) return nullptr;
        auto sum = make_all_reduce_topk(SparseVector<float>(100), OkTopkSettings{.k = 5}, {}, Reduction::sum, {});
        results.push_back(sum.result);
        return sum.request;
      });
      EXPECT(ended.stuck);
      for (const auto& result : results) EXPECT(!result->has_value());
    }
  }
}

enum class Lie { share, counts, bytes, order };

// What a damaged rank does, the second of two. It tells the truth until sums are gathered: which then is a share of a vector
// of which the first rank has both entries that count. Or its share of the first rank's slice is a vector.
Task<void> lie(Transport& net, Lie what, SparseVector<float> mine, std::uint64_t k) {
  SparseTraffic traffic;
  const PooledSlices cut = co_await pooled_slices(net, mine.indices(), mine.dimension(), traffic, 0);
  SparseReduction how;
  how.switch_factor = std::numeric_limits<double>::infinity();
  SplitBucket whole;
  whole.first_step = kSliceSteps;
  if (what == Lie::share) mine = SparseVector<float>::dense(std::vector<float>(mine.dimension(), 1.0F));
  const OwnedSlice<float> owned = co_await reduce_owned_slice(net, mine, cut.slices, how, whole);
  if (what == Lie::share) co_return;
  Step step = kSliceSteps + split_steps<float>(net, cut.slices);
  co_await global_threshold_key<float>(net, owned.values.span(), k, traffic, step);
  step += kThresholdSteps;
  const std::uint64_t counts[2] = {what == Lie::counts ? 3U : 0U, 2};
  const Buffer all(2 * sizeof counts);
  co_await allgather_bruck(net, std::as_bytes(std::span(counts)), all.bytes(), Partition(all.size(), 2), step);
  if (what == Lie::counts) co_return;
  step += 32;  // the gathered counts'
  const std::size_t most = sizeof(VectorHeader) + sizeof(std::uint32_t) + sizeof(float) + 16;
  const Buffer share = co_await receive_any_size(net, 0, step, most);
  step += any_size_steps(net, most);
  Buffer damaged(most);
  std::memset(damaged.data(), 0, most);
  if (what == Lie::order) {
    const std::uint32_t low = 0;
    const float value = 1.0F;
    damaged = encode(SparseView<float>{slice_of(cut.slices, 0), false, std::span(&low, 1), std::span(&value, 1)});
  }
  co_await allgather_short(net, damaged.bytes(), "sums", step, most);
}

TEST("a rank whose counts or sums are damaged ends the operation on all ranks, and is named") {
  const Input<float> mine{.indices = {1, 3, 60, 70}, .values = {5.0F, 6.0F, 0.5F, 0.25F}};
  const OkTopkSettings settings{.k = 2, .balance_factor = 1.5};
  const std::pair<Lie, const char*> kLies[] = {{Lie::share, "rank 1 sent damaged entries: its entries are dense"},
                                               {Lie::counts, "rank 1 says that it keeps 3 of 2 sums, in a slice of"},
                                               {Lie::bytes, "rank 1 sent damaged sums"},
                                               {Lie::order, "its indices do not follow those of the rank before"}};
  for (const World world : kWorlds) {
    for (const auto& [what, reason] : kLies) {
      const Ended ended = run_ranks(world, 2, [&](Rank rank) {
        const RequestPtr request = make_all_reduce_topk(mine.vector(100), settings, {}, Reduction::sum, {}).request;
        if (rank == 0) return request;
        return std::make_shared<Request>(request->call(), [&, what = what](Transport& net) {
          return lie(net, what, mine.vector(100), settings.k);
        });
      });
      REQUIRE(ended.requests[0]->failure().has_value());
      EXPECT(ended.requests[0]->failure()->reason.find(reason) != std::string::npos);
      EXPECT_EQ(ended.requests[0]->failure()->peer, 1U);
    }
  }
}

}  // namespace
