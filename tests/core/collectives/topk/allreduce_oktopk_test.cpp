// Ok-Topk: the k largest of the sum, the same bits everywhere; what has no part in the sum is handed back.
#include "testing.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "codec/short_share.hpp"
#include "collectives/support/any_size.hpp"
#include "collectives/support/sum_counts.hpp"
#include "collectives/topk/short_shares.hpp"
#include "collectives/topk/threshold.hpp"
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
            EXPECT(results[0].report.exact);
          }
        }
      }
    }
  }
}

TEST("every dtype, sum and mean, and every format of indices; and ties") {
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
          EXPECT(results[0].report.selected >= 60);
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

// Of each call whether its threshold was found: 'x'. Every rank's entries become `factor(time)` times as large.
template <class V>
std::string exact_calls(int calls, const std::function<float(int time)>& factor) {
  constexpr std::uint64_t kN = 20'000;
  const OkTopkSettings settings{.k = 500};
  Random random(7);
  OkTopkState state;
  std::string exact;
  float scale = 1.0F;
  for (int time = 0; time < calls; ++time) {
    scale *= factor(time);
    std::vector<Input<V>> inputs;
    for (Rank rank = 0; rank < 5; ++rank) {
      inputs.push_back(normal<V>(kN, 0.03, random));
      for (V& value : inputs.back().values) value = static_cast<V>(scale * static_cast<float>(value));
    }
    const auto results = call(World::local, inputs, kN, settings, state);
    check_call(inputs, kN, settings, Reduction::sum, results);
    exact += results[0].report.exact ? 'x' : '.';
    state = results[0].state;
  }
  return exact;
}

TEST("a threshold that has become useless is moved, and found only where sums have become of another size") {
  const std::string due = "x" + std::string(31, '.') + "x" + std::string(31, '.');
  Random random(8);
  const auto wandering = [&random](int) { return static_cast<float>(0.7 + 0.75 * random.uniform()); };
  EXPECT_EQ(exact_calls<float>(64, wandering), due);
  EXPECT_EQ(exact_calls<bf16>(64, wandering), due);
  EXPECT_EQ(exact_calls<float>(64, [](int) { return 1.3F; }), due);
  EXPECT_EQ(exact_calls<double>(64, [](int) { return 0.75F; }), due);
  EXPECT_EQ(exact_calls<float>(4, [](int time) { return time == 2 ? 10.0F : 1.0F; }), std::string("x.x."));
  EXPECT_EQ(exact_calls<float>(4, [](int time) { return time == 2 ? 0.1F : 1.0F; }), std::string("x.x."));
}

template <class V>
void check_tensors(Rank size, Reduction reduction) {
  constexpr std::uint64_t kN = 3000;
  constexpr std::array kTensors{IndexRange{0, 1000}, IndexRange{1100, 1600}, IndexRange{1600, 3000}};
  constexpr std::array kScales{1.0F, 1.0F / 16, 2.0F};  // of their entries
  const OkTopkSettings settings{.k = 60, .threshold_every = 3, .tensors = {kTensors.begin(), kTensors.end()}};
  Random random(size);
  OkTopkState state;
  std::array<double, 3> squares{};
  std::array<std::size_t, 3> kept{}, first{};  // entries of each
  for (int time = 0; time < 10; ++time) {
    std::vector<Input<V>> inputs;
    for (Rank rank = 0; rank < size; ++rank) {
      inputs.push_back(normal<V>(kN, 0.05, random));
      for (std::size_t i = 0; i < inputs.back().indices.size(); ++i) {
        const std::uint32_t index = inputs.back().indices[i];
        const float scale = index < 1000 ? kScales[0] : index >= 1600 ? kScales[2] : index < 1100 ? 0.0F : kScales[1];
        inputs.back().values[i] = static_cast<V>(scale * static_cast<float>(inputs.back().values[i]));
      }
    }
    const auto results = call(World::local, inputs, kN, settings, state, reduction);
    check_call(inputs, kN, settings, reduction, results);
    state = results[0].state;
    std::array<double, 3> weights{1.0, 1.0, 1.0};
    if (time >= 3 && !std::is_same_v<V, f16>) {
      for (std::size_t i = 0; i < 3; ++i) weights[i] = std::sqrt(std::sqrt(std::ranges::min(squares) / squares[i]));
    }
    auto weighed = sum_of(inputs, reduction);
    for (auto& [index, value] : weighed) {
      const double weight = index < 1000 ? weights[0] : index < 1100 ? 1.0 : index < 1600 ? weights[1] : weights[2];
      value = kernels::times(value, static_cast<kernels::Factor<V>>(weight));
    }
    const auto& sum = results[0].sum;
    if (results[0].report.exact) {
      const std::vector<std::uint32_t> expected = largest(weighed, settings.k).indices;
      EXPECT(std::ranges::equal(sum.indices(), expected));
    }
    std::array<double, 3> means{};
    kept = {};
    for (std::size_t i = 0; i < sum.nnz(); ++i) {
      const std::size_t tensor = sum.indices()[i] < 1000 ? 0 : sum.indices()[i] < 1600 ? 1 : 2;
      const auto value = static_cast<double>(static_cast<kernels::Factor<V>>(sum.values()[i]));
      means[tensor] += value * value / static_cast<double>(kTensors[tensor].size());
      ++kept[tensor];
    }
    for (std::size_t i = 0; time % 3 == 2 && i < 3; ++i) {
      const double ratio = std::clamp(static_cast<double>(sum.nnz()) / 60, 0.5, 1.5);  // by which the threshold has moved
      const double used = state.threshold / (1.0 + (ratio - 1.0) / 4);
      const double below = used / weights[i];  // its threshold
      if (kept[i] == 0) means[i] = below * below * 60 / kN;
      squares[i] = squares[i] > 0.0 ? (squares[i] + means[i]) / 2 : means[i];
    }
    for (std::size_t i = 0; i < 3; ++i) EXPECT(std::abs(state.squares[i] - squares[i]) <= 1e-9 * squares[i]);
    if (time < 3) first = kept;
  }
  EXPECT_EQ(first[1], 0U);
  EXPECT(kept[2] > 0);
  if (size > 1 && !std::is_same_v<V, f16>) EXPECT(kept[0] > first[0]);
}

TEST("sums of several tensors are compared by what a step along an entry gains") {
  for (const Rank size : {1U, 3U, 4U}) {
    for (const Reduction reduction : {Reduction::sum, Reduction::avg}) {
      check_tensors<float>(size, reduction);
      check_tensors<double>(size, reduction);
      check_tensors<bf16>(size, reduction);
      check_tensors<f16>(size, reduction);
    }
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
        OkTopkSettings{.k = 5, .as_published = true}, OkTopkSettings{.k = 5, .tensors = {{0, 100}}}}) {
    EXPECT(layout_of(other, {}) != first);
  }
  for (const OkTopkState& other : {OkTopkState{.calls = 1}, OkTopkState{.threshold = 0.5}, OkTopkState{.lengths = {50, 50}},
                                    OkTopkState{.squares = {1.0}}}) {
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

enum class Lie { share, counts, ties, unlike, bytes };

// What a damaged rank does, the second of two: it tells the truth until then. Each rank has two entries in each of two equal
// slices; those that count are the first rank's, of which each then has one to gather. For ties, all equal each other.
Task<void> lie(Transport& net, Lie what, SparseVector<float> mine, std::uint64_t k) {
  SparseTraffic traffic;
  Step step = 0;
  const Partition slices(static_cast<std::size_t>(mine.dimension()), 2);
  std::uint64_t counts[] = {2, 0, 4, 4, 0};
  co_await sum_counts(net, counts, 2, mine.dimension(), traffic, step);
  step += kSumCountsSteps;
  const std::byte no_entry{3};
  if (what == Lie::share) {
    co_await net.send(0, step, {&no_entry, 1});
    co_return;
  }
  const OwnedSlice<float> owned = co_await split_short_shares(net, mine, slices, 4, Reduction::sum, traffic, step++);
  co_await global_threshold_key<float>(net, owned.values.span(), k, mine.dimension(), traffic, step);
  step += kThresholdSteps;
  const std::uint64_t kept = what == Lie::counts ? 101 : what == Lie::ties ? 2 : what == Lie::bytes ? 1 : 0;
  const std::uint64_t said = kept << 1;
  co_await gather_counts(net, std::span(&said, 1), traffic, step);
  if (what == Lie::counts) co_return;
  step += kGatherCountsSteps;
  if (what == Lie::ties) {
    const std::uint64_t tied = 3;
    co_await gather_counts(net, std::span(&tied, 1), traffic, step);
    co_return;
  }
  co_await net.send(0, step, {&no_entry, 1});
}

TEST("a rank whose counts, entries or sums are damaged ends the operation on all ranks, and is named") {
  const std::pair<Lie, const char*> kLies[] = {
      {Lie::share, "rank 1 sent damaged entries: its bytes are not"},
      {Lie::counts, "rank 1 says that it keeps 101 sums, in a slice of 50"},
      {Lie::ties, "rank 1 says that 3 of 2 sums equal the threshold"},
      {Lie::unlike, "bytes instead of at most 0"},
      {Lie::bytes, "rank 1 sent damaged sums: its bytes are not"}};
  for (const World world : kWorlds) {
    for (const auto& [what, reason] : kLies) {
      const bool ties = what == Lie::ties;
      const Input<float> mine{.indices = {1, 3, 60, 70},
                              .values = ties ? std::vector(4, 1.0F) : std::vector{5.0F, 6.0F, 0.5F, 0.25F}};
      const OkTopkSettings settings{.k = ties ? 1U : 2U};
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

TEST("so is one that says that it has sent more entries uncounted than there are indices") {
  for (const World world : kWorlds) {
    const Input<float> mine{.indices = {1, 3, 60, 70}, .values = {5.0F, 6.0F, 0.5F, 0.25F}};
    const OkTopkState state{.calls = 1, .threshold = 1.0, .lengths = {50, 50}, .spread = true};
    const Ended ended = run_ranks(world, 2, [&](Rank rank) {
      const RequestPtr request = make_all_reduce_topk(mine.vector(100), OkTopkSettings{.k = 72}, state, Reduction::sum, {}).request;
      if (rank == 0) return request;
      return std::make_shared<Request>(request->call(), [&](Transport& net) -> Task<void> {
        SparseTraffic traffic;
        const Partition slices(std::size_t{100}, 2);
        co_await split_short_shares(net, mine.vector(100), slices, 4, Reduction::sum, traffic, 0);
        const std::uint64_t said[] = {0, 101 << 1, 2};
        co_await gather_counts(net, said, traffic, 1);
      });
    });
    REQUIRE(ended.requests[0]->failure().has_value());
    EXPECT(ended.requests[0]->failure()->reason.find("rank 1 says that it has 101 entries of 100") != std::string::npos);
    EXPECT_EQ(ended.requests[0]->failure()->peer, 1U);
  }
}

// The second of eight ranks, all of which have the same 16 entries in each slice. The first slice's are the largest, and are
// all that is kept. This rank gets two of them when shares are made alike, and gathers two others.
Task<void> repeat_indices(Transport& net, SparseVector<float> mine) {
  SparseTraffic traffic;
  Step step = 0;
  const Partition slices(static_cast<std::size_t>(mine.dimension()), net.size());
  std::uint64_t counts[] = {16, 0, 16, 16, 16, 16, 16, 16, 128, 128, 0};
  co_await sum_counts(net, counts, 2, mine.dimension(), traffic, step);
  step += kSumCountsSteps;
  const OwnedSlice<float> owned = co_await split_short_shares(net, mine, slices, 128, Reduction::sum, traffic, step++);
  co_await global_threshold_key<float>(net, owned.values.span(), 16, mine.dimension(), traffic, step);
  step += kThresholdSteps;
  const std::uint64_t said = 0;
  co_await gather_counts(net, std::span(&said, 1), traffic, step);
  step += kGatherCountsSteps;
  const Buffer share = co_await net.receive_any_size(0, step, 100);
  step += any_size_steps(net, sizeof(VectorHeader) + 2 * (sizeof(std::uint32_t) + sizeof(float)) + 16);
  const std::uint32_t first[] = {0, 1};
  const float ones[] = {1.0F, 1.0F};
  std::vector<std::size_t> begins;
  for (std::size_t rank = 0; rank <= net.size(); ++rank) begins.push_back(2 * rank);
  const std::vector<IndexRange> ranges(net.size(), slice_of(slices, 0));
  std::vector<std::uint32_t> indices(16);
  std::vector<float> values(16);
  co_await gather_short_shares<float>(net, {ranges[0], false, first, ones}, {begins, ranges, indices, values}, true, step);
}

TEST("a rank that gathers other sums than those it was given when shares were made alike is named") {
  Input<float> mine;
  for (std::uint32_t i = 0; i < 128; ++i) {
    mine.indices.push_back(i / 16 * 50 + i % 16);
    mine.values.push_back(i < 16 ? 100.0F + static_cast<float>(i) : 1.0F);
  }
  for (const World world : kWorlds) {
    const Ended ended = run_ranks(world, 8, [&](Rank rank) {
      const RequestPtr request = make_all_reduce_topk(mine.vector(400), OkTopkSettings{.k = 16}, {}, Reduction::sum, {}).request;
      if (rank != 1) return request;
      return std::make_shared<Request>(request->call(), [&](Transport& net) { return repeat_indices(net, mine.vector(400)); });
    });
    REQUIRE(ended.requests[0]->failure().has_value());
    EXPECT(ended.requests[0]->failure()->reason.find("its indices do not follow those of the rank before") != std::string::npos);
    EXPECT_EQ(ended.requests[0]->failure()->peer, 1U);
  }
}

TEST("a threshold that keeps too many is moved without another exchange of counts") {
  for (const World world : kWorlds) {
    std::vector<std::uint64_t> control_bytes;
    for (const float factor : {1.0F, 1.3F, 0.7F}) {
      Random random(5);
      std::vector<Input<float>> inputs(3);
      OkTopkState state;
      for (const float scale : {1.0F, factor}) {
        for (Input<float>& input : inputs) {
          input = normal<float>(20'000, 0.2, random);
          for (float& value : input.values) value *= scale;
        }
        const OkTopkSettings settings{.k = 1000};
        auto results = call(world, inputs, 20'000, settings, state);
        check_call(inputs, 20'000, settings, Reduction::sum, results);
        state = results[0].state;
        if (state.calls == 2) {
          EXPECT(!results[0].report.exact);
          control_bytes.push_back(results[0].report.traffic.control_bytes_sent);
        }
      }
    }
    EXPECT(control_bytes[1] <= control_bytes[0] + 8);
    EXPECT(control_bytes[2] > control_bytes[0] + 16);
  }
}

TEST("of equal sums twice as many as wanted stay at most, those of the lowest indices") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 5U, 8U, 16U}) {
      for (const std::uint64_t k : {1UL, 3UL, 10UL, 60UL}) {
        Random random(size + k);
        std::vector<Input<float>> inputs(size);
        for (Rank rank = 0; rank < size; ++rank) {
          inputs[rank] = uniform<float>(500, 0.4, random);
          for (std::size_t i = 0; i < inputs[rank].values.size(); ++i) {
            inputs[rank].values[i] = inputs[rank].indices[i] % 100 == 7 ? 9.0F : rank % 2 == 0 ? 1.0F : -1.0F;
          }
        }
        const OkTopkSettings settings{.k = k, .threshold_every = 2};
        OkTopkState state;
        for (int time = 0; time < 4; ++time) {
          const auto results = call(world, inputs, 500, settings, state, Reduction::sum, IndexFormat::packed, size);
          check_call(inputs, 500, settings, Reduction::sum, results);
          state = results[0].state;
        }
      }
    }
  }
}

}  // namespace
