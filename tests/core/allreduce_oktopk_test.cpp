// Ok-Topk: the k largest of the sum, the same bits everywhere; words within the bound for every input and call; what has no
// part in the sum is handed back.
#include "testing.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "collectives/allgather_bruck.hpp"
#include "collectives/allgather_short.hpp"
#include "collectives/any_size.hpp"
#include "collectives/global_threshold.hpp"
#include "collectives/pooled_slices.hpp"
#include "collectives/sparse_split.hpp"
#include "session/reductions.hpp"
#include "sparse_samples.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr World kWorlds[] = {World::simulated, World::local};

template <class V>
using Results = std::vector<OkTopkSum<V>>;

template <class V>
Results<V> call(World world, const std::vector<Input<V>>& inputs, std::uint64_t n, const OkTopkSettings& settings,
                const OkTopkState& state, Reduction reduction = Reduction::sum, IndexFormat indices = IndexFormat::none,
                std::uint64_t seed = 0) {
  std::vector<std::shared_ptr<std::optional<OkTopkSum<V>>>> results;
  const Ended ended = run_ranks(
      world, static_cast<Rank>(inputs.size()),
      [&](Rank rank) {
        auto sum = make_all_reduce_topk(inputs[rank].stream(n), settings, state, reduction, {.indices = indices});
        results.push_back(sum.result);
        return sum.request;
      },
      seed);
  REQUIRE(ended.all_succeeded());
  Results<V> all;
  for (auto& result : results) all.push_back(std::move(**result));
  return all;
}

// By index: the sum in the order of ranks.
template <class V>
std::map<std::uint32_t, V> sum_of(const std::vector<Input<V>>& inputs, Reduction reduction) {
  std::map<std::uint32_t, V> sums;
  for (const auto& input : inputs) {
    for (std::size_t i = 0; i < input.indices.size(); ++i) {
      const auto [at, is_new] = sums.try_emplace(input.indices[i], input.values[i]);
      if (!is_new) at->second = kernels::plus(at->second, input.values[i]);
    }
  }
  if (reduction == Reduction::avg) {
    const auto factor = static_cast<kernels::Factor<V>>(1.0 / static_cast<double>(inputs.size()));
    for (auto& [index, value] : sums) value = kernels::times(value, factor);
  }
  return sums;
}

// The k largest, and what equals the least of them.
template <class V>
Input<V> largest(const std::map<std::uint32_t, V>& sums, std::uint64_t k) {
  std::vector<std::uint64_t> keys;
  for (const auto& [index, value] : sums) keys.push_back(magnitude_key(value));
  std::ranges::sort(keys, std::greater<>());
  const std::uint64_t least = keys.size() < k ? 0 : keys[k - 1];
  Input<V> kept;
  for (const auto& [index, value] : sums) {
    if (magnitude_key(value) < least) continue;
    kept.indices.push_back(index);
    kept.values.push_back(value);
  }
  return kept;
}

// What holds in every call: ranks agree, and every entry of a rank is either taken or handed back.
template <class V>
void check_call(const std::vector<Input<V>>& inputs, std::uint64_t n, const OkTopkSettings& settings, Reduction reduction,
                const Results<V>& results) {
  const auto sums = sum_of(inputs, reduction);
  std::uint64_t local_most = 0;
  for (const auto& input : inputs) local_most = std::max(local_most, static_cast<std::uint64_t>(input.indices.size()));
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    const auto& [sum, left, state, report] = results[rank];
    EXPECT(!sum.is_dense());
    EXPECT_EQ(sum.dimension(), n);
    EXPECT(same_bits(sum, results[0].sum));
    EXPECT_EQ(state.digest(settings), results[0].state.digest(settings));
    EXPECT_EQ(report.local_most, local_most);
    EXPECT_EQ(report.selected, sum.nnz());
    EXPECT_EQ(report.exact, results[0].report.exact);
    const std::uint64_t most = std::max(local_most, report.selected);
    EXPECT(report.words_most() <= 6 * most + 2 * results.size());
    sent += report.traffic.entries_sent;
    received += report.traffic.entries_received;
    Input<V> back;
    for (std::size_t i = 0; i < inputs[rank].indices.size(); ++i) {
      if (std::ranges::binary_search(sum.indices(), inputs[rank].indices[i])) continue;
      back.indices.push_back(inputs[rank].indices[i]);
      back.values.push_back(inputs[rank].values[i]);
    }
    EXPECT(same_bits(left, back.stream(n)));
  }
  EXPECT_EQ(sent, received);
  for (std::size_t i = 0; i < results[0].sum.nnz(); ++i) {
    const auto at = sums.find(results[0].sum.indices()[i]);
    REQUIRE(at != sums.end());
    EXPECT(std::memcmp(&at->second, &results[0].sum.values()[i], sizeof(V)) == 0);
  }
  if (results[0].report.exact) EXPECT(same_bits(results[0].sum, largest(sums, settings.k).stream(n)));
}

// As uniform(), of values that are sums of many.
template <class V>
Input<V> normal(std::uint64_t n, double density, Random& random) {
  Input<V> input = uniform<V>(n, density, random);
  for (V& value : input.values) {
    double sum = -4.0;
    for (int i = 0; i < 8; ++i) sum += random.uniform();
    value = static_cast<V>(static_cast<float>(sum));
  }
  return input;
}

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

// What ranks select in call number `time`.
using Pattern = std::function<std::vector<std::uint32_t>(Rank rank, Rank size, int time, std::uint64_t n, Random& random)>;

std::vector<std::uint32_t> within(std::uint64_t begin, std::uint64_t end, std::size_t count, Random& random) {
  std::vector<std::uint32_t> indices;
  for (std::size_t i = 0; i < count; ++i) indices.push_back(static_cast<std::uint32_t>(begin + random.below(end - begin)));
  std::ranges::sort(indices);
  const auto repeated = std::ranges::unique(indices);
  indices.erase(repeated.begin(), repeated.end());
  return indices;
}

constexpr std::size_t kK = 300;

const std::pair<const char*, Pattern> kPatterns[] = {
    {"uniform", [](Rank, Rank, int, std::uint64_t n, Random& random) { return within(0, n, kK, random); }},
    {"one slice", [](Rank, Rank size, int, std::uint64_t n, Random& random) { return within(0, n / size, kK, random); }},
    {"one rank clustered elsewhere",
     [](Rank rank, Rank, int, std::uint64_t n, Random& random) {
       return rank == 0 ? within(n - n / 50, n, kK, random) : within(0, n / 50, kK, random);
     }},
    {"gone stale",
     [](Rank, Rank size, int time, std::uint64_t n, Random& random) {
       const std::uint64_t at = static_cast<std::uint64_t>(time) % size;
       return within(n * at / size, n * (at + 1) / size, kK, random);
     }},
    {"identical",
     [](Rank, Rank, int time, std::uint64_t n, Random&) {
       Random same(static_cast<std::uint64_t>(time));
       return within(0, n / 3, kK, same);
     }},
    {"disjoint",
     [](Rank rank, Rank size, int, std::uint64_t n, Random& random) {
       return within(n * rank / size, n * (rank + 1) / size, kK, random);
     }},
    {"one entry for all",
     [](Rank, Rank, int, std::uint64_t n, Random&) {
       return std::vector<std::uint32_t>{static_cast<std::uint32_t>(n - 1)};
     }},
    {"a solid run",
     [](Rank, Rank, int, std::uint64_t n, Random&) {
       std::vector<std::uint32_t> indices(kK);
       std::iota(indices.begin(), indices.end(), static_cast<std::uint32_t>(n / 2));
       return indices;
     }},
    {"very unequal",
     [](Rank rank, Rank size, int, std::uint64_t n, Random& random) {
       return within(0, n, rank == size / 2 ? kK : rank % 3, random);
     }},
    {"nobody", [](Rank, Rank, int, std::uint64_t, Random&) { return std::vector<std::uint32_t>(); }},
};

std::vector<Input<float>> inputs_of(const Pattern& pattern, Rank size, int time, std::uint64_t n, std::uint64_t seed) {
  std::vector<Input<float>> inputs(size);
  Random random(seed + static_cast<std::uint64_t>(time));
  for (Rank rank = 0; rank < size; ++rank) {
    inputs[rank].indices = pattern(rank, size, time, n, random);
    for (std::size_t i = 0; i < inputs[rank].indices.size(); ++i) {
      // Large ones lie together, so that shares of the sum are unlike.
      const float scale = inputs[rank].indices[i] < n / 100 ? 8.0F : 1.0F;
      inputs[rank].values.push_back(scale * static_cast<float>(random.uniform() - 0.4));
    }
  }
  return inputs;
}

void check_pattern(const Pattern& pattern, Rank size, int calls, const OkTopkSettings& settings) {
  constexpr std::uint64_t kN = 1'000'000;
  OkTopkState state;
  for (int time = 0; time < calls; ++time) {
    const auto inputs = inputs_of(pattern, size, time, kN, size);
    const auto results = call(World::simulated, inputs, kN, settings, state);
    check_call(inputs, kN, settings, Reduction::sum, results);
    state = results[0].state;
    EXPECT_EQ(state.calls, static_cast<std::uint64_t>(time) + 1);
  }
}

TEST("no rank moves more words than the bound says, in any call, whatever the ranks hold") {
  for (const Rank size : {1U, 2U, 3U, 4U, 7U, 8U, 16U, 31U, 64U}) {
    for (const auto& [name, pattern] : kPatterns) {
      for (const std::uint64_t k : {kK / 10, kK}) {
        check_pattern(pattern, size, 5, {.k = k, .boundaries_every = 4, .threshold_every = 3});
      }
    }
  }
}

TEST("of many ranks too") {
  for (const auto& [name, pattern] : kPatterns) {
    if (std::string(name) != "nobody") check_pattern(pattern, 128, 2, {.k = kK});
  }
  check_pattern(kPatterns[3].second, 256, 2, {.k = kK});
  check_pattern(kPatterns[2].second, 1024, 1, {.k = kK});
}

TEST("slices are cut when it is time, and when they would bring an owner too much; not otherwise") {
  constexpr std::uint64_t kN = 1'000'000;
  const OkTopkSettings settings{.k = kK, .boundaries_every = 4};
  const auto cuts_of = [&](const Pattern& pattern) {
    std::string cuts;
    OkTopkState state;
    for (int time = 0; time < 6; ++time) {
      const auto results = call(World::local, inputs_of(pattern, 8, time, kN, 1), kN, settings, state);
      cuts += results[0].report.cut ? 'x' : '.';
      state = results[0].state;
    }
    return cuts;
  };
  EXPECT_EQ(cuts_of(kPatterns[3].second), std::string("xxxxxx"));  // everything in the next slice, every time
  EXPECT_EQ(cuts_of(kPatterns[7].second), std::string("x...x."));  // always the same
}

TEST("very unlike shares are made alike before they are gathered") {
  constexpr std::uint64_t kN = 100'000;
  for (const Rank size : {2U, 3U, 8U, 16U}) {
    for (const bool is_unlike : {false, true}) {
      std::vector<Input<float>> inputs(size);
      for (Rank rank = 0; rank < size; ++rank) {  // each slice has as many entries; large ones lie in one, or all over
        for (std::uint32_t i = 0; i < 4000; ++i) {
          inputs[rank].indices.push_back(i * 25);
          const bool is_large = is_unlike ? i < 100 : i % 40 == 0;
          inputs[rank].values.push_back(is_large ? 100.0F + static_cast<float>(i) : 0.001F * static_cast<float>(i));
        }
      }
      for (const double factor : {1.5, 4.0}) {
        const OkTopkSettings settings{.k = 100, .balance_factor = factor};
        const auto results = call(World::local, inputs, kN, settings, {});
        check_call(inputs, kN, settings, Reduction::sum, results);
        EXPECT_EQ(results[0].report.balanced, is_unlike && (size > 4 || (factor < 2.0)));
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

// Training without a model: residuals grow by gradients, whole numbers so that sums are exact, and give what reaches a
// threshold of their own.
struct Training {
  explicit Training(Rank size) : residuals(size, std::vector<float>(kN)), thresholds(size) {}

  std::vector<Input<float>> select(int time, std::uint64_t k, Random& random) {
    std::vector<Input<float>> inputs(residuals.size());
    for (std::size_t rank = 0; rank < residuals.size(); ++rank) {
      std::vector<float>& residual = residuals[rank];
      for (std::size_t i = 0; i < kN; ++i) {  // the variance differs from place to place, and changes slowly
        const double width = 40.0 + 30.0 * std::sin(static_cast<double>(i) / 2000.0 + time / 100.0);
        double noise = -6.0;
        for (int j = 0; j < 12; ++j) noise += random.uniform();
        residual[i] += static_cast<float>(std::round(width * noise));
      }
      if (time % 8 == 0) {
        std::vector<float> sizes;
        for (const float value : residual) sizes.push_back(std::abs(value));
        std::ranges::nth_element(sizes, sizes.begin() + static_cast<std::ptrdiff_t>(k), std::greater<>());
        thresholds[rank] = sizes[k];
      }
      for (std::uint32_t i = 0; i < kN; ++i) {
        if (std::abs(residual[i]) < thresholds[rank]) continue;
        inputs[rank].indices.push_back(i);
        inputs[rank].values.push_back(std::exchange(residual[i], 0.0F));
      }
    }
    return inputs;
  }

  double total(std::size_t i) const {
    double total = 0.0;
    for (const auto& residual : residuals) total += residual[i];
    return total;
  }

  static constexpr std::size_t kN = 6000;
  std::vector<std::vector<float>> residuals;
  std::vector<float> thresholds;
};

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
      std::vector<double> before(Training::kN);
      for (std::size_t i = 0; i < Training::kN; ++i) before[i] = training.total(i);
      for (const auto& input : inputs) {
        for (std::size_t i = 0; i < input.indices.size(); ++i) before[input.indices[i]] += input.values[i];
      }
      const auto results = call(World::local, inputs, Training::kN, settings, state);
      check_call(inputs, Training::kN, settings, Reduction::sum, results);
      for (Rank rank = 0; rank < size; ++rank) {
        const SparseStream<float>& left = results[rank].left;
        for (std::size_t i = 0; i < left.nnz(); ++i) training.residuals[rank][left.indices()[i]] += left.values()[i];
      }
      std::vector<float> taken(Training::kN);
      results[0].sum.write_dense(taken);
      bool is_whole = true;
      for (std::size_t i = 0; i < Training::kN; ++i) is_whole &= training.total(i) + taken[i] == before[i];
      EXPECT(is_whole);
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

TEST("as published, boundaries that have become stale and sums gathered in one place break the bound") {
  constexpr std::uint64_t kN = 1'000'000;
  const auto excess = [&](const Pattern& pattern, bool as_published) {
    const OkTopkSettings settings{.k = kK, .as_published = as_published};
    OkTopkState state;
    double worst = 0.0;
    for (int time = 0; time < 3; ++time) {
      const auto inputs = inputs_of(pattern, 16, time, kN, 16);
      const auto results = call(World::local, inputs, kN, settings, state);
      if (!as_published) check_call(inputs, kN, settings, Reduction::sum, results);
      for (const auto& [sum, left, next, report] : results) {
        EXPECT(same_bits(sum, results[0].sum));
        std::uint64_t most = report.selected;
        for (const auto& input : inputs) most = std::max(most, static_cast<std::uint64_t>(input.indices.size()));
        worst = std::max(worst, static_cast<double>(report.words_most()) / static_cast<double>(6 * most + 2 * 16));
      }
      if (as_published && time == 0) EXPECT(same_bits(results[0].sum, largest(sum_of(inputs, Reduction::sum), kK).stream(kN)));
      state = results[0].state;
    }
    return worst;
  };
  for (const std::size_t i : {0U, 2U, 3U, 5U}) {
    EXPECT(excess(kPatterns[i].second, true) > 1.2);
    EXPECT(excess(kPatterns[i].second, false) <= 1.0);
  }
}

TEST("ranks of other settings, or with another past, do not call the same") {
  const auto layout_of = [](const OkTopkSettings& settings, const OkTopkState& state) {
    return make_all_reduce_topk(SparseStream<float>(100), settings, state, Reduction::sum, {}).request->call().layout;
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
        auto sum = make_all_reduce_topk(SparseStream<float>(100), OkTopkSettings{.k = 5}, {}, Reduction::sum, {});
        results.push_back(sum.result);
        return sum.request;
      });
      EXPECT(ended.stuck);
      for (const auto& result : results) EXPECT(!result->has_value());
    }
  }
}

enum class Lie { counts, bytes, order };

// What a damaged rank does, the second of two. It tells the truth until sums are gathered: which then is a share of a stream
// of which the first rank has both entries that count.
Task<void> lie(Transport& net, Lie what, SparseStream<float> mine, std::uint64_t k) {
  SparseTraffic traffic;
  const PooledSlices cut = co_await pooled_slices(net, mine.indices(), mine.dimension(), traffic, 0);
  SparseReduction how;
  how.switch_factor = std::numeric_limits<double>::infinity();
  SplitBucket whole;
  whole.first_step = kSliceSteps;
  const OwnedSlice<float> owned = co_await reduce_owned_slice(net, mine, cut.slices, how, whole);
  Step step = kSliceSteps + split_steps<float>(net, cut.slices);
  co_await global_threshold_key<float>(net, owned.values.span(), k, traffic, step);
  step += kThresholdSteps;
  const std::uint64_t counts[2] = {what == Lie::counts ? 3U : 0U, 2};
  const Buffer all(2 * sizeof counts);
  co_await allgather_bruck(net, std::as_bytes(std::span(counts)), all.bytes(), Partition(all.size(), 2), step);
  if (what == Lie::counts) co_return;
  step += 32;  // the gathered counts'
  const std::size_t most = sizeof(StreamHeader) + sizeof(std::uint32_t) + sizeof(float) + 16;
  const Buffer share = co_await receive_any_size(net, 0, step, most);
  step += any_size_steps(net, most);
  Buffer damaged(most);
  std::memset(damaged.data(), 0, most);
  if (what == Lie::order) {
    const std::uint32_t low = 0;
    const float value = 1.0F;
    damaged = encode(StreamView<float>{slice_of(cut.slices, 0), false, std::span(&low, 1), std::span(&value, 1)});
  }
  co_await allgather_short(net, damaged.bytes(), "sums", step, most);
}

TEST("a rank whose counts or sums are damaged ends the operation on all ranks, and is named") {
  const Input<float> mine{.indices = {1, 3, 60, 70}, .values = {5.0F, 6.0F, 0.5F, 0.25F}};
  const OkTopkSettings settings{.k = 2, .balance_factor = 1.5};
  const std::pair<Lie, const char*> kLies[] = {{Lie::counts, "rank 1 says that it keeps 3 of 2 sums, in a slice of"},
                                               {Lie::bytes, "rank 1 sent damaged sums"},
                                               {Lie::order, "its indices do not follow those of the rank before"}};
  for (const World world : kWorlds) {
    for (const auto& [what, reason] : kLies) {
      const Ended ended = run_ranks(world, 2, [&](Rank rank) {
        const RequestPtr request = make_all_reduce_topk(mine.stream(100), settings, {}, Reduction::sum, {}).request;
        if (rank == 0) return request;
        return std::make_shared<Request>(request->call(), [&, what = what](Transport& net) {
          return lie(net, what, mine.stream(100), settings.k);
        });
      });
      REQUIRE(ended.requests[0]->failure().has_value());
      EXPECT(ended.requests[0]->failure()->reason.find(reason) != std::string::npos);
      EXPECT_EQ(ended.requests[0]->failure()->peer, 1U);
    }
  }
}

}  // namespace
