// The bounded allreduce of the largest: what it gives by brute force, that nothing is lost, and that all of its messages are
// those of any other entries.
#include "testing.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "collectives/dense/all_to_all.hpp"
#include "collectives/dense/allgather_bruck.hpp"
#include "collectives/topk/block.hpp"
#include "collectives/topk/largest.hpp"
#include "topk_calls.hpp"
#include "topk_patterns.hpp"
#include "topk_training.hpp"

namespace {

using namespace telegrad;

// Of `entries`, the `most` largest that reach the key; ties to the lowest index.
template <class V>
Sparse<V> largest_of(const Sparse<V>& entries, std::uint64_t most, std::uint64_t key) {
  std::vector<std::pair<std::uint64_t, std::uint32_t>> order;
  for (const auto& [index, value] : entries) {
    if (magnitude_key(value) >= key) order.push_back({~magnitude_key(value), index});
  }
  std::ranges::sort(order);
  Sparse<V> kept;
  for (std::size_t i = 0; i < std::min<std::size_t>(most, order.size()); ++i) {
    kept[order[i].second] = entries.at(order[i].second);
  }
  return kept;
}

// By brute force, of the slices that were used.
template <class V>
void check_call(const std::vector<Input<V>>& inputs, std::uint64_t n, const BoundedTopkSettings& settings,
                const BoundedTopkState& before, Reduction reduction, const std::vector<BoundedTopkSum<V>>& results) {
  const std::size_t size = inputs.size();
  const std::size_t capacity = bounded_topk_capacity(settings, static_cast<Rank>(size), n);
  EXPECT(capacity <= n && (capacity == n || static_cast<double>(capacity * size) >= settings.slack * static_cast<double>(settings.k)));
  const Partition slices(std::span<const std::uint64_t>(results[0].state.lengths));
  REQUIRE(slices.blocks() == size && slices.count() == n);
  const auto factor = static_cast<kernels::Factor<V>>(1.0 / static_cast<double>(size));
  const double threshold = results[0].state.threshold;
  const std::uint64_t key = magnitude_key(static_cast<V>(static_cast<kernels::Factor<V>>(threshold)));
  Sparse<V> sum;
  std::vector<Sparse<V>> unsent(size);
  for (std::size_t owner = 0; owner < size; ++owner) {
    Sparse<V> sums;
    for (std::size_t rank = 0; rank < size; ++rank) {
      Sparse<V> share;
      for (std::size_t i = 0; i < inputs[rank].indices.size(); ++i) {
        const std::uint32_t index = inputs[rank].indices[i];
        if (index >= slices[owner].begin && index < slices[owner].end) share[index] = inputs[rank].values[i];
      }
      const Sparse<V> sent = rank == owner ? share : largest_of(share, capacity, 0);
      for (const auto& [index, value] : share) {
        if (!sent.contains(index)) unsent[rank][index] = value;
      }
      for (const auto& [index, value] : sent) {
        const auto [at, is_new] = sums.try_emplace(index, value);
        if (!is_new) at->second = kernels::plus(at->second, value);
      }
    }
    if (reduction == Reduction::avg) {
      for (auto& [index, value] : sums) value = kernels::times(value, factor);
    }
    sum.merge(largest_of(sums, capacity, key));
  }
  const std::uint64_t words = 2 * 2 * capacity * (size - 1);
  for (std::size_t rank = 0; rank < size; ++rank) {
    const auto& [found, left, state, report] = results[rank];
    EXPECT(!found.is_dense() && found.dimension() == n && left.dimension() == n);
    EXPECT(same(map_of(found), sum));
    Sparse<V> expected = unsent[rank];
    for (std::size_t i = 0; i < inputs[rank].indices.size(); ++i) {
      if (!sum.contains(inputs[rank].indices[i])) expected[inputs[rank].indices[i]] = inputs[rank].values[i];
    }
    EXPECT(same(map_of(left), expected));
    EXPECT_EQ(state.digest(settings), results[0].state.digest(settings));
    EXPECT_EQ(state.calls, before.calls + 1);
    EXPECT_EQ(report.selected, sum.size());
    EXPECT_EQ(report.overflow, unsent[rank].size());
    EXPECT_EQ(report.local_most, inputs[rank].indices.size());
    EXPECT_EQ(report.cut, before.calls % settings.boundaries_every == 0 || before.lengths.size() != size);
    EXPECT_EQ(2 * report.traffic.entries_sent, words);
    EXPECT_EQ(2 * report.traffic.entries_received, words);
  }
}

TEST("what fits, sums and stays: every world, P, length, density and k, in calls that follow each other") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 4U, 5U, 7U, 8U, 13U, 16U, 17U, 33U, 64U}) {
      for (const std::uint64_t n : {0UL, 1UL, 63UL, 2000UL}) {
        for (const double density : {0.02, 1.0}) {
          for (const std::uint64_t k : {1UL, 30UL, 5000UL}) {
            if (size > 8 && (world == World::local || density == 1.0)) continue;
            Random random(size * 1000 + n + k);
            const BoundedTopkSettings settings{.k = k, .slack = 1.0 + 0.25 * static_cast<double>(k % 4), .boundaries_every = 2};
            BoundedTopkState state;
            for (int time = 0; time < 3; ++time) {
              std::vector<Input<float>> inputs;
              for (Rank rank = 0; rank < size; ++rank) inputs.push_back(uniform<float>(n, density, random));
              const auto results = call(world, inputs, n, settings, state, Reduction::sum, IndexFormat::none, size);
              check_call(inputs, n, settings, state, Reduction::sum, results);
              EXPECT_EQ(lost_most(inputs, n, Reduction::sum, results), 0.0);
              state = results[0].state;
            }
          }
        }
      }
    }
  }
}

TEST("every dtype, sum and mean") {
  const auto run = [&]<class V>(V) {
    for (const Rank size : {1U, 3U, 4U, 6U}) {
      for (const Reduction reduction : {Reduction::sum, Reduction::avg}) {
        const BoundedTopkSettings settings{.k = 60};
        BoundedTopkState state;
        for (int time = 0; time < 3; ++time) {
          Random random(size);
          std::vector<Input<V>> inputs;
          for (Rank rank = 0; rank < size; ++rank) {
            inputs.push_back(uniform<V>(2000, 0.05, random));
            for (V& value : inputs.back().values) value = static_cast<V>(static_cast<float>(random.uniform() - 0.5));
          }
          const auto results = call(World::local, inputs, 2000, settings, state, reduction);
          check_call(inputs, 2000, settings, state, reduction, results);
          constexpr double kRounding = std::is_same_v<V, double> ? 1e-15 : std::is_same_v<V, float> ? 1e-6 : 0.05;
          EXPECT(lost_most(inputs, 2000, reduction, results) <= kRounding * size);
          state = results[0].state;
        }
      }
    }
  };
  run(float{});
  run(double{});
  run(bf16{});
  run(f16{});
}

TEST("whatever ranks hold, also with boundaries that have become stale") {
  constexpr std::uint64_t kN = 100'000;
  for (const Rank size : {2U, 3U, 7U, 33U, 64U}) {
    for (const auto& [name, pattern] : kPatterns) {
      const BoundedTopkSettings settings{.k = kK, .boundaries_every = 2};
      BoundedTopkState state;
      for (int time = 0; time < 3; ++time) {
        const auto inputs = inputs_of(pattern, size, time, kN, size);
        const auto results = call(World::simulated, inputs, kN, settings, state);
        check_call(inputs, kN, settings, state, Reduction::sum, results);
        EXPECT(lost_most(inputs, kN, Reduction::sum, results) < 1e-4);
        state = results[0].state;
      }
    }
  }
}

TEST("long blocks go in pieces, and round a ring") {
  constexpr std::uint64_t kN = 500'000;
  for (const World world : kWorlds) {
    Random random(5);
    std::vector<Input<float>> inputs;
    for (Rank rank = 0; rank < 3; ++rank) inputs.push_back(uniform<float>(kN, 0.4, random));
    const BoundedTopkSettings settings{.k = 150'000};
    const auto results = call(world, inputs, kN, settings, {}, Reduction::sum, IndexFormat::none, 1);
    check_call(inputs, kN, settings, {}, Reduction::sum, results);
  }
}

TEST("slices hold about as many entries, cut in rounds that are the same for all") {
  constexpr std::uint64_t kN = 1'000'000;
  for (const Rank size : {2U, 5U, 16U, 64U}) {
    std::vector<std::uint64_t> bytes;
    for (const auto& [name, pattern] : kPatterns) {
      const auto inputs = inputs_of(pattern, size, 0, kN, size);
      const auto results = call(World::local, inputs, kN, BoundedTopkSettings{.k = 1}, {});
      bytes.push_back(results[0].report.traffic.control_bytes_sent);
      const Partition slices(std::span<const std::uint64_t>(results[0].state.lengths));
      std::uint64_t total = 0;
      std::vector<std::uint64_t> held(size);
      for (const auto& input : inputs) {
        for (const std::uint32_t index : input.indices) {
          ++total;
          std::size_t owner = 0;
          while (index >= slices[owner].end) ++owner;
          ++held[owner];
        }
      }
      for (const std::uint64_t one : held) EXPECT(one <= total / size + size);
    }
    EXPECT_EQ(std::ranges::count(bytes, bytes[0]), std::ranges::ssize(bytes));
  }
}

// Per rank: messages, and bytes to each other rank; and when all was over.
using Shape = std::tuple<std::vector<std::uint64_t>, std::vector<std::vector<std::uint64_t>>, double>;

Shape shape_of(const std::vector<Input<float>>& inputs, std::uint64_t n, const BoundedTopkSettings& settings,
               const BoundedTopkState& state, bool size_only) {
  const auto size = static_cast<Rank>(inputs.size());
  Simulation simulation(size, {.costs = {.gamma_s_per_byte = 1e-9}, .size_only = size_only});
  std::vector<RequestPtr> requests;
  for (Rank rank = 0; rank < size; ++rank) {
    requests.push_back(make_all_reduce_topk(inputs[rank].vector(n), settings, state, Reduction::avg, {}).request);
    simulation.begin(rank, requests.back());
  }
  const Outcome outcome = simulation.run();
  REQUIRE(!outcome.deadlock);
  Shape shape{{}, {}, outcome.finish_s};
  for (Rank rank = 0; rank < size; ++rank) {
    EXPECT(!requests[rank]->failure());
    const Session::Counters& counters = simulation.session(rank).counters();
    std::get<0>(shape).push_back(counters.messages_sent);
    std::get<1>(shape).emplace_back();
    for (const auto& peer : counters.peers) std::get<1>(shape).back().push_back(peer.bytes_sent);
  }
  return shape;
}

TEST("number, sizes and times of messages follow from k, slack, P and the number of the call, not from the entries") {
  constexpr std::uint64_t kN = 100'000;
  for (const Rank size : {2U, 3U, 8U, 13U, 33U}) {
    for (const std::uint64_t k : {std::uint64_t{kK}, std::uint64_t{90'000}}) {  // blocks short and long
      if (k != kK && size > 3) continue;
      const BoundedTopkSettings settings{.k = k, .slack = 1.5};
      std::vector<std::uint64_t> lengths(size, kN / size);
      lengths.back() += kN % size;
      const BoundedTopkState kStates[] = {{}, {.calls = 1, .threshold = 0.25, .lengths = lengths}};
      std::vector<Shape> expected;
      for (const BoundedTopkState& state : kStates) {
        const Shape first = shape_of(inputs_of(kPatterns[0].second, size, 0, kN, 1), kN, settings, state, false);
        for (const auto& [name, pattern] : kPatterns) {
          EXPECT(shape_of(inputs_of(pattern, size, 1, kN, size), kN, settings, state, false) == first);
        }
        const std::vector<Input<float>> none(size);
        EXPECT(shape_of(none, kN, settings, state, true) == first);
        expected.push_back(first);
      }
      EXPECT(std::get<0>(expected[0]) != std::get<0>(expected[1]));  // one of them cuts slices
      EXPECT(shape_of(inputs_of(kPatterns[0].second, size, 0, kN, 1), kN, {.k = k, .slack = 2.0}, {}, false) != expected[0]);
    }
  }
}

TEST("what ranks hold and what the sums have taken is all there ever was, and sums keep about k") {
  for (const Rank size : {1U, 3U, 4U, 8U}) {
    constexpr std::uint64_t kKept = 120;
    const BoundedTopkSettings settings{.k = kKept, .boundaries_every = 10};
    Training training(size);
    Random random(size);
    BoundedTopkState state;
    double deviation = 0.0;
    constexpr int kCalls = 50;
    for (int time = 0; time < kCalls; ++time) {
      const auto inputs = training.select(time, kKept, random);
      const std::vector<double> before = training.totals(inputs);
      const auto results = call(World::local, inputs, Training::kN, settings, state);
      check_call(inputs, Training::kN, settings, state, Reduction::sum, results);
      EXPECT(training.give_back(results, before));
      state = results[0].state;
      const double relative = static_cast<double>(results[0].report.selected) / kKept - 1.0;
      EXPECT(std::abs(relative) <= 0.25);
      deviation += std::abs(relative) / kCalls;
    }
    EXPECT(deviation < 0.05);
  }
}

TEST("sums keep about k, of any scale, also of very few values, and of NaN") {
  constexpr std::uint64_t kN = 10'000;
  const BoundedTopkSettings settings{.k = 100};
  BoundedTopkState state;
  for (const Rank size : {1U, 2U, 4U, 16U, 64U}) {
    for (const float scale : {1.0F, 1e6F, 1e-6F, 0.0F, std::numeric_limits<float>::quiet_NaN()}) {
      Random random(3);
      std::vector<Input<float>> inputs;
      for (Rank rank = 0; rank < size; ++rank) {
        inputs.push_back(uniform<float>(kN, 0.02, random));
        for (float& value : inputs.back().values) value = scale * static_cast<float>(random.uniform() - 0.5);
      }
      const auto results = call(World::local, inputs, kN, settings, state);
      check_call(inputs, kN, settings, state, Reduction::sum, results);
      state = results[0].state;
      EXPECT(std::isfinite(state.threshold));
      const std::uint64_t selected = results[0].report.selected;
      if (scale > 0) EXPECT(selected >= 90 && selected <= 110);
      if (!(scale > 0)) EXPECT(selected >= 100 && selected <= size * bounded_topk_capacity(settings, size, kN));
    }
  }
}

TEST("ranks of other settings, or with another past, do not call the same") {
  const auto layout_of = [](const BoundedTopkSettings& settings, const BoundedTopkState& state) {
    const Call call = make_all_reduce_topk(SparseVector<float>(100), settings, state, Reduction::sum, {}).request->call();
    EXPECT(call.algorithm == Algorithm::bounded);
    return call.layout;
  };
  const BoundedTopkSettings settings{.k = 5};
  const std::uint64_t first = layout_of(settings, {});
  EXPECT_EQ(first, layout_of({.k = 5}, {}));
  for (const BoundedTopkSettings& other : {BoundedTopkSettings{.k = 6}, BoundedTopkSettings{.k = 5, .slack = 2.0},
                                           BoundedTopkSettings{.k = 5, .boundaries_every = 63}}) {
    EXPECT(layout_of(other, {}) != first);
  }
  for (const BoundedTopkState& other :
       {BoundedTopkState{.calls = 1}, BoundedTopkState{.threshold = 0.5}, BoundedTopkState{.lengths = {50, 50}}}) {
    EXPECT(layout_of(settings, other) != first);
  }
}

TEST("no rank is through before all have called") {
  for (const World world : kWorlds) {
    for (Rank absent = 0; absent < 4; ++absent) {
      std::vector<std::shared_ptr<std::optional<BoundedTopkSum<float>>>> results;
      const BoundedTopkState later{.calls = 1, .lengths = {25, 25, 25, 25}};
      const Ended ended = run_ranks(world, 4, [&](Rank rank) -> RequestPtr {
        if (rank == absent) return nullptr;
        auto sum = make_all_reduce_topk(SparseVector<float>(100), BoundedTopkSettings{.k = 5}, later, Reduction::sum, {});
        results.push_back(sum.result);
        return sum.request;
      });
      EXPECT(ended.stuck);
      for (const auto& result : results) EXPECT(!result->has_value());
    }
  }
}

TEST("a block says what is wrong with it") {
  const BlockShape<float> shape{.capacity = 3};
  const Input<float> two{.indices = {11, 13}, .values = {1.0F, -2.0F}};
  Buffer block(shape.bytes());
  const auto vector = two.vector(20);
  const auto read = [&](auto damage) {
    write_block<float>(shape, vector.slice(10, 20), block.bytes());
    damage();
    SparseView<float> into;
    const std::string error = read_block<float>(shape, block.bytes(), {10, 20}, into);
    EXPECT_EQ(into.nnz(), error.empty() ? 2U : 0U);
    if (error.empty()) EXPECT(std::ranges::equal(into.indices, two.indices) && std::ranges::equal(into.values, two.values));
    return error;
  };
  const auto set_index = [&](std::size_t at, std::uint32_t index) {
    std::memcpy(block.data() + shape.indices_at() + at * sizeof index, &index, sizeof index);
  };
  const auto set_count = [&](std::uint64_t count) { std::memcpy(block.data(), &count, sizeof count); };
  const std::string kUnordered = "the indices of a block do not ascend";
  EXPECT_EQ(read([] {}), std::string());
  EXPECT_EQ(read([&] { set_count(4); }), std::string("a block for 3 entries says that it has 4"));
  EXPECT_EQ(read([&] { set_count(~0ULL); }).substr(0, 13), std::string("a block for 3"));
  EXPECT_EQ(read([&] { set_count(3); }), kUnordered);  // the third is 0
  EXPECT_EQ(read([&] { set_index(0, 13); }), kUnordered);
  EXPECT_EQ(read([&] { set_index(0, 9); }), std::string("a block of the indices from 10 below 20 has some from 9 to 13"));
  EXPECT_EQ(read([&] { set_index(1, 20); }), std::string("a block of the indices from 10 below 20 has some from 11 to 20"));
  EXPECT_EQ(BlockShape<bf16>{.capacity = 3}.bytes(), std::size_t{8 + 8 + 16});
}

// What a damaged rank does, the second of two: it hears all, and lies at first or in the end.
Task<void> lie(Transport& net, bool at_first) {
  const BlockShape<float> shape{.capacity = 3};
  Buffer block(shape.bytes());
  std::memset(block.data(), at_first ? 9 : 0, block.size());
  const Buffer heard(shape.bytes());
  co_await net.send(0, 0, block.bytes());
  co_await net.receive(0, 0, heard.bytes());
  if (at_first) co_return;
  const float mark = 0.0F;
  const Buffer marks(2 * sizeof mark);
  co_await allgather_bruck(net, std::as_bytes(std::span(&mark, 1)), marks.bytes(), Partition(marks.size(), 2),
                           kExchangeBlocksSteps);
  std::memset(block.data(), 9, block.size());
  const Buffer all(2 * block.size());
  co_await allgather_bruck(net, block.bytes(), all.bytes(), Partition(2 * block.size(), 2),
                           kExchangeBlocksSteps + 32);
}

TEST("damaged blocks end the call, and their sender is named") {
  const Input<float> mine{.indices = {1, 3, 60, 70}, .values = {5.0F, 6.0F, 0.5F, 0.25F}};
  const BoundedTopkState state{.calls = 1, .lengths = {50, 50}};
  for (const World world : kWorlds) {
    for (const bool at_first : {true, false}) {
      const Ended ended = run_ranks(world, 2, [&](Rank rank) {
        const BoundedTopkSettings settings{.k = 4};
        const RequestPtr request = make_all_reduce_topk(mine.vector(100), settings, state, Reduction::sum, {}).request;
        if (rank == 0) return request;
        return std::make_shared<Request>(request->call(), [at_first](Transport& net) { return lie(net, at_first); });
      });
      REQUIRE(ended.requests[0]->failure().has_value());
      const char* const what = at_first ? "rank 1 sent damaged entries: a block for 3 entries says"
                                        : "rank 1 sent damaged sums: a block for 3 entries says";
      EXPECT(ended.requests[0]->failure()->reason.find(what) != std::string::npos);
      EXPECT_EQ(ended.requests[0]->failure()->peer, 1U);
    }
  }
}

}  // namespace
