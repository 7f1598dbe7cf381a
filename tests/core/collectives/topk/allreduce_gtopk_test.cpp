// gTopk: what a tree of merges keeps, the same bits everywhere; what merges drop is handed back, and nothing is lost.
#include "testing.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/support/any_size.hpp"
#include "collectives/topk/largest.hpp"
#include "topk_calls.hpp"
#include "topk_patterns.hpp"

namespace {

using namespace telegrad;

template <class V>
void add(Sparse<V>& to, std::uint32_t index, V value) {
  const auto [at, is_new] = to.try_emplace(index, value);
  if (!is_new) at->second = kernels::plus(at->second, value);
}

// The k largest stay in `sum`, the others go to `dropped`.
template <class V>
void cut(Sparse<V>& sum, Sparse<V>& dropped, std::uint64_t k) {
  std::vector<std::pair<std::uint64_t, std::uint32_t>> order;
  for (const auto& [index, value] : sum) order.push_back({~magnitude_key(value), index});
  std::ranges::sort(order);
  for (std::size_t i = k; i < order.size(); ++i) {
    add(dropped, order[i].second, sum[order[i].second]);
    sum.erase(order[i].second);
  }
}

// By brute force: level by level of the tree, all in one place.
template <class V>
struct Expected {
  Sparse<V> sum;
  std::vector<Sparse<V>> left;

  Expected(const std::vector<Input<V>>& inputs, std::uint64_t k, Reduction reduction) : left(inputs.size()) {
    const std::size_t size = inputs.size();
    std::vector<Sparse<V>> sums(size);
    std::vector<Sparse<V>> dropped(size);
    for (std::size_t rank = 0; rank < size; ++rank) {
      for (std::size_t i = 0; i < inputs[rank].indices.size(); ++i) sums[rank][inputs[rank].indices[i]] = inputs[rank].values[i];
      cut(sums[rank], dropped[rank], k);
    }
    for (std::size_t distance = 1; distance < size; distance *= 2) {
      for (std::size_t rank = 0; rank + distance < size; rank += 2 * distance) {
        for (const auto& [index, value] : sums[rank + distance]) add(sums[rank], index, value);
        cut(sums[rank], dropped[rank], k);
      }
    }
    sum = sums[0];
    for (std::size_t rank = 0; rank < size; ++rank) {
      for (std::size_t i = 0; i < inputs[rank].indices.size(); ++i) {
        const std::uint32_t index = inputs[rank].indices[i];
        if (!sum.contains(index)) left[rank][index] = inputs[rank].values[i];
      }
      for (const auto& [index, value] : dropped[rank]) {
        if (sum.contains(index)) left[rank][index] = value;
      }
    }
    if (reduction == Reduction::avg) {
      const auto factor = static_cast<kernels::Factor<V>>(1.0 / static_cast<double>(size));
      for (auto& [index, value] : sum) value = kernels::times(value, factor);
    }
  }
};

template <class V>
void check_call(const std::vector<Input<V>>& inputs, std::uint64_t n, std::uint64_t k, Reduction reduction,
                const std::vector<GTopkSum<V>>& results) {
  const Expected<V> expected(inputs, k, reduction);
  const auto levels = static_cast<std::uint64_t>(std::bit_width(inputs.size() - 1));
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    const auto& [sum, left, state, report] = results[rank];
    EXPECT(!sum.is_dense() && sum.dimension() == n && left.dimension() == n);
    EXPECT(same_bits(sum, results[0].sum));
    EXPECT(same(map_of(sum), expected.sum));
    EXPECT(same(map_of(left), expected.left[rank]));
    EXPECT(sum.nnz() <= k);
    EXPECT_EQ(report.selected, sum.nnz());
    EXPECT_EQ(report.local_most, inputs[rank].indices.size());
    EXPECT_EQ(report.overflow, inputs[rank].indices.size() - std::min<std::size_t>(inputs[rank].indices.size(), k));
    EXPECT(report.words_most() <= 2 * std::min(k, n) * levels);
    EXPECT(!report.cut && !report.exact && !report.balanced);
    sent += report.traffic.entries_sent;
    received += report.traffic.entries_received;
  }
  EXPECT_EQ(sent, received);
}

TEST("gTopk is the tree of its paper: every world, P, length, density and k; and nothing is lost") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 4U, 5U, 6U, 7U, 8U, 9U, 12U, 13U, 16U, 17U, 33U, 64U}) {
      for (const std::uint64_t n : {0UL, 1UL, 63UL, 2000UL}) {
        for (const double density : {0.02, 1.0}) {
          for (const std::uint64_t k : {1UL, 30UL, 5000UL}) {
            if (size > 8 && (world == World::local || density == 1.0)) continue;
            Random random(size * 1000 + n + k);
            std::vector<Input<float>> inputs;
            for (Rank rank = 0; rank < size; ++rank) inputs.push_back(uniform<float>(n, density, random));
            const auto results = call(world, inputs, n, GTopkSettings{.k = k}, {}, Reduction::sum, IndexFormat::packed, size);
            check_call(inputs, n, k, Reduction::sum, results);
            EXPECT_EQ(lost_most(inputs, n, Reduction::sum, results), 0.0);
          }
        }
      }
    }
  }
}

TEST("every dtype, sum and mean, and every format of indices") {
  const auto run = [&]<class V>(V) {
    for (const Rank size : {1U, 3U, 4U, 6U}) {
      for (const Reduction reduction : {Reduction::sum, Reduction::avg}) {
        for (const IndexFormat indices : {IndexFormat::none, IndexFormat::raw32, IndexFormat::packed}) {
          Random random(size);
          std::vector<Input<V>> whole;
          std::vector<Input<V>> real;
          for (Rank rank = 0; rank < size; ++rank) {
            whole.push_back(uniform<V>(2000, 0.05, random));
            real.push_back(uniform<V>(2000, 0.05, random));
            for (V& value : real.back().values) value = static_cast<V>(static_cast<float>(random.uniform() - 0.5));
          }
          const GTopkSettings settings{.k = 60};
          auto results = call(World::local, whole, 2000, settings, {}, reduction, indices);
          check_call(whole, 2000, settings.k, reduction, results);
          const bool is_exact = reduction == Reduction::sum || size != 3;
          if (is_exact && size != 6) EXPECT_EQ(lost_most(whole, 2000, reduction, results), 0.0);
          results = call(World::simulated, real, 2000, settings, {}, reduction, indices);
          check_call(real, 2000, settings.k, reduction, results);
          constexpr double kRounding = std::is_same_v<V, double> ? 1e-15 : std::is_same_v<V, float> ? 1e-6 : 0.05;
          EXPECT(lost_most(real, 2000, reduction, results) <= kRounding * size);
        }
      }
    }
  };
  run(float{});
  run(double{});
  run(bf16{});
  run(f16{});
}

TEST("whatever ranks hold; and what the merges of one subtree drop and another brings is not lost") {
  constexpr std::uint64_t kN = 100'000;
  for (const Rank size : {2U, 3U, 7U, 33U, 64U}) {
    for (const auto& [name, pattern] : kPatterns) {
      const auto inputs = inputs_of(pattern, size, 1, kN, size);
      for (const std::uint64_t k : {kK / 10, kK}) {
        const auto results = call(World::simulated, inputs, kN, GTopkSettings{.k = k}, {});
        check_call(inputs, kN, k, Reduction::sum, results);
        EXPECT(lost_most(inputs, kN, Reduction::sum, results) < 1e-4);
      }
    }
  }
  // Rank 0 drops its 2 at index 9 for rank 1's 3; ranks 2 and 3 bring that index into the result.
  const std::vector<Input<float>> inputs{
      {{9}, {2.0F}}, {{5}, {3.0F}}, {{9}, {4.0F}}, {{9}, {5.0F}}};
  const auto results = call(World::local, inputs, 10, GTopkSettings{.k = 1}, {});
  EXPECT(same(map_of(results[0].sum), Sparse<float>{{9, 9.0F}}));
  EXPECT(same(map_of(results[0].left), Sparse<float>{{9, 2.0F}}));
  EXPECT(same(map_of(results[1].left), Sparse<float>{{5, 3.0F}}));
  EXPECT(results[2].left.nnz() == 0 && results[3].left.nnz() == 0);
}

TEST("long messages go in pieces") {
  constexpr std::uint64_t kN = 500'000;
  for (const World world : kWorlds) {
    Random random(5);
    std::vector<Input<float>> inputs;
    for (Rank rank = 0; rank < 3; ++rank) inputs.push_back(uniform<float>(kN, 0.4, random));
    const auto results = call(world, inputs, kN, GTopkSettings{.k = 170'000}, {}, Reduction::sum, IndexFormat::packed, 1);
    check_call(inputs, kN, 170'000, Reduction::sum, results);
    EXPECT_EQ(lost_most(inputs, kN, Reduction::sum, results), 0.0);
  }
}

TEST("no rank is through before all have called") {
  for (const World world : kWorlds) {
    for (Rank absent = 0; absent < 5; ++absent) {
      std::vector<std::shared_ptr<std::optional<GTopkSum<float>>>> results;
      const Ended ended = run_ranks(world, 5, [&](Rank rank) -> RequestPtr {
        if (rank == absent) return nullptr;
        auto sum = make_all_reduce_topk(SparseVector<float>(100), GTopkSettings{.k = 5}, {}, Reduction::sum, {});
        results.push_back(sum.result);
        return sum.request;
      });
      EXPECT(ended.stuck);
      for (const auto& result : results) EXPECT(!result->has_value());
    }
  }
}

TEST("another k, and another algorithm of the same k, are other calls") {
  const auto call_of = [](const auto& settings) {
    return make_all_reduce_topk(SparseVector<float>(100), settings, {}, Reduction::sum, {}).request->call();
  };
  EXPECT(call_of(GTopkSettings{.k = 5}) == call_of(GTopkSettings{.k = 5}));
  EXPECT(!(call_of(GTopkSettings{.k = 5}) == call_of(GTopkSettings{.k = 6})));
  EXPECT(!(call_of(GTopkSettings{.k = 5}) == call_of(OkTopkSettings{.k = 5})));
  EXPECT(describe(call_of(GTopkSettings{.k = 5})).find("algorithm=gtopk") != std::string::npos);
}

// What a damaged rank says, of two: the one its sum, or the other the result.
Task<void> lie(Transport& net, ConstBytes what) {
  if (net.rank() == 0) co_await receive_any_size(net, 1, 0, 100);
  co_await send_any_size(net, 1 - net.rank(), net.rank() == 0 ? 1 : 0, what);
}

TEST("damaged messages end the call, and their sender is named") {
  const Input<float> mine{.indices = {1, 3}, .values = {5.0F, 6.0F}};
  const Input<float> many{.indices = {1, 3, 60, 70}, .values = {5.0F, 6.0F, 0.5F, 0.25F}};
  const Buffer too_many = encode(many.vector(100).view(), {.indices = IndexFormat::packed, .packs_values = true});
  Buffer garbage(64);
  std::memset(garbage.data(), 7, garbage.size());
  const std::vector<float> all(10, 1.0F);
  const auto dense = SparseVector<float>::dense(all);
  const Buffer densely = encode(dense.view());
  const std::pair<const Buffer*, std::pair<std::uint64_t, const char*>> kLies[] = {
      {&garbage, {100, "rank 1 sent damaged sums"}}, {&too_many, {100, "it has 4 entries, and k is 3"}},
      {&densely, {10, "it has 10 entries, and k is 3"}}};
  for (const World world : kWorlds) {
    for (const bool from_above : {false, true}) {
      for (const auto& [message, what] : kLies) {
        const std::uint64_t n = what.first;
        Input<float> own = mine;
        if (n == 10) own = {.indices = {1}, .values = {1.0F}};
        const Rank liar = from_above ? 0 : 1;
        const Ended ended = run_ranks(world, 2, [&](Rank rank) {
          const RequestPtr request = make_all_reduce_topk(own.vector(n), GTopkSettings{.k = 3}, {}, Reduction::sum, {}).request;
          if (rank != liar) return request;
          return std::make_shared<Request>(request->call(),
                                           [bytes = message->bytes()](Transport& net) { return lie(net, bytes); });
        });
        const auto failure = ended.requests[1 - liar]->failure();
        REQUIRE(failure.has_value());
        std::string reason = what.second;
        if (reason[0] == 'r') reason[5] = static_cast<char>('0' + liar);
        EXPECT(failure->reason.find(reason) != std::string::npos);
        EXPECT_EQ(failure->peer, liar);
      }
    }
  }
}

}  // namespace
