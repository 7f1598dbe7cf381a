// The words that Ok-Topk moves: within the bound for every input and call; as published they are not.
#include "testing.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "oktopk_calls.hpp"
#include "topk_patterns.hpp"

namespace {

using namespace telegrad;

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

TEST("slices are cut when they would bring an owner too much, at due calls for half as much; not otherwise") {
  constexpr std::uint64_t kN = 1'000'000;
  const OkTopkSettings settings{.k = kK, .boundaries_every = 4};
  // From the second call on the first of 8 owners would receive 7 times 54 entries: 78 more than the 300 that a rank has, where
  // the excess is 103.
  const Pattern drifting = [](Rank, Rank size, int time, std::uint64_t n, Random&) {
    std::vector<std::uint32_t> indices;
    const std::uint64_t slice = n / size;
    const std::uint64_t first = time == 0 ? 37 : 54;
    for (std::uint64_t i = 0; i < first; ++i) indices.push_back(static_cast<std::uint32_t>(i * slice / first));
    for (std::uint64_t i = 0; i < kK - first; ++i) {
      indices.push_back(static_cast<std::uint32_t>(slice + i * (n - slice) / (kK - first)));
    }
    return indices;
  };
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
  EXPECT_EQ(cuts_of(kPatterns[7].second), std::string("x....."));  // always the same
  EXPECT_EQ(cuts_of(kPatterns[0].second), std::string("......"));  // as chance has it
  EXPECT_EQ(cuts_of(drifting), std::string("....x."));  // by more than half of the excess, and less than all of it
}

TEST("after a call of spread entries they go uncounted; a rank that has many for one owner holds them back, and all begin again") {
  constexpr std::uint64_t kN = 96'000;
  constexpr std::uint64_t kOfRank = 1200;
  // As many of a rank's entries as `many` in the slice `owner`, the others evenly in the other slices.
  const auto input_of = [](Rank size, Rank owner, std::uint64_t many, Random& random) {
    std::vector<std::uint32_t> indices;
    const std::uint64_t slice = kN / size;
    const std::uint64_t others = (kOfRank - many) / (size - 1);
    for (Rank to = 0; to < size; ++to) {
      const std::uint64_t count = to == owner ? many : others;
      for (std::uint64_t i = 0; i < count; ++i) {
        indices.push_back(static_cast<std::uint32_t>(to * slice + i * slice / count + random.below(slice / count)));
      }
    }
    Input<float> input{.indices = std::move(indices), .values = {}};
    for (std::size_t i = 0; i < input.indices.size(); ++i) input.values.push_back(static_cast<float>(random.uniform() - 0.4));
    return input;
  };
  for (const Rank size : {3U, 4U, 8U, 16U, 33U}) {
    const OkTopkSettings settings{.k = kOfRank};
    const std::uint64_t most = 2 * kOfRank / size;
    // The first owner gets as much as can go uncounted, but for what one rank holds back, or all do.
    for (const Rank holding : {Rank{1}, size}) {
      Random random(size);
      OkTopkState state;
      std::string cuts;
      for (int time = 0; time < 5; ++time) {
        std::vector<Input<float>> inputs;
        for (Rank rank = 0; rank < size; ++rank) {
          const bool holds = time == 2 && rank + holding >= size;
          inputs.push_back(input_of(size, 0, time != 2 ? kOfRank / size : holds ? kOfRank : most, random));
        }
        const auto results = call(World::local, inputs, kN, settings, state);
        check_call(inputs, kN, settings, Reduction::sum, results);
        cuts += results[0].report.cut ? 'x' : '.';
        state = results[0].state;
        if (time < 3) EXPECT_EQ(state.spread, time < 2);
      }
      EXPECT_EQ(cuts.substr(0, 3), std::string("..x"));
    }
  }
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
        // Among a few ranks doubling stays within its bound however unlike short shares are.
        EXPECT_EQ(results[0].report.balanced, is_unlike && size > 4);
      }
    }
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
        worst = std::max(worst, static_cast<double>(report.words_most()) / static_cast<double>(oktopk_words_most(most, 16)));
      }
      if (as_published && time == 0) EXPECT(same_bits(results[0].sum, largest(sum_of(inputs, Reduction::sum), kK).vector(kN)));
      state = results[0].state;
    }
    return worst;
  };
  for (const std::size_t i : {0U, 2U, 3U, 5U}) {
    EXPECT(excess(kPatterns[i].second, true) > 1.2);
    EXPECT(excess(kPatterns[i].second, false) <= 1.0);
  }
}

}  // namespace
