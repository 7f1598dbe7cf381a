// The bytes that Ok-Topk moves, headers and counts included: within the bound for every input and call, and for evenly spread
// entries no more for many ranks than for few.
#include "testing.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "oktopk_calls.hpp"
#include "topk_patterns.hpp"

namespace {

using namespace telegrad;

// By the rank that sends or receives most, of 4k.
double share_of(const Results<float>& results, std::uint64_t k) {
  std::uint64_t most = 0;
  for (const auto& result : results) most = std::max(most, result.report.bytes_most());
  return static_cast<double>(most) / static_cast<double>(4 * k);
}

TEST("bytes stay flat with the number of ranks, from the first call on") {
  const std::pair<Rank, std::uint64_t> kSizes[] = {{4, 1000}, {16, 1000}, {64, 1000}, {128, 1000}, {256, 1000}, {64, 4000}, {128, 4000}};
  for (const auto& [size, k] : kSizes) {
    const std::uint64_t n = 100 * k;
    const OkTopkSettings settings{.k = k};
    OkTopkState state;
    Random random(size);
    for (int time = 0; time < 2; ++time) {
      std::vector<Input<float>> inputs;
      for (Rank rank = 0; rank < size; ++rank) inputs.push_back(normal<float>(n, 0.01, random));
      const auto results = call(World::simulated, inputs, n, settings, state, Reduction::sum, IndexFormat::raw32);
      check_call(inputs, n, settings, Reduction::sum, results);
      EXPECT(share_of(results, k) <= 5.0);
      EXPECT(!results[0].report.cut);
      state = results[0].state;
    }
  }
}

TEST("of 1,024 ranks too") {
  constexpr std::uint64_t kN = 100'000;
  Random random(1);
  std::vector<Input<float>> inputs;
  for (Rank rank = 0; rank < 1024; ++rank) inputs.push_back(normal<float>(kN, 0.01, random));
  const auto results = call(World::simulated, inputs, kN, OkTopkSettings{.k = 1000}, {});
  check_call(inputs, kN, {.k = 1000}, Reduction::sum, results);
  EXPECT(share_of(results, 1000) <= 5.0);
}

// Where one rank's entries lie, and which values they have, made to be hard: in clusters of any width, at the same places on
// all ranks or not, of equal values or of all exponents, on few ranks or on all.
class Adversary {
 public:
  explicit Adversary(std::uint64_t seed, Rank ranks = 0, std::uint64_t k_most = 60) : random_(seed) {
    size = static_cast<Rank>(1 + random_.below(random_.below(8) == 0 ? 40 : 10));
    if (seed % 100 == 7) size = static_cast<Rank>(64 + random_.below(70));
    if (ranks > 0) size = ranks;
    n = 1 + random_.below(random_.below(3) == 0 ? 1'000'000 : 50 * k_most);
    settings = {.k = 1 + random_.below(k_most),
                .boundaries_every = 1 + random_.below(5),
                .threshold_every = 1 + random_.below(5),
                .balance_factor = random_.below(2) == 0 ? 4.0 : 1.0 + 3.0 * random_.uniform()};
  }

  std::vector<Input<float>> next() {
    std::vector<Input<float>> inputs(size);
    const bool identical = random_.below(4) == 0;
    const std::uint64_t clusters = 1 + random_.below(random_.below(2) == 0 ? 3 : 60);
    const std::uint64_t width = 1 + random_.below(random_.below(2) == 0 ? 4 : n);
    const std::uint64_t kind = random_.below(4);
    const std::uint64_t silent = random_.below(5);
    // By up to twice, for which a threshold is moved, or by far more.
    scale_ = static_cast<float>(std::exp2((random_.below(6) == 0 ? 40.0 : 2.0) * (random_.uniform() - 0.5)));
    std::vector<std::uint64_t> begins;
    for (std::uint64_t i = 0; i < clusters; ++i) begins.push_back(random_.below(n));
    for (Rank rank = 0; rank < size; ++rank) {
      if (silent == 0 && rank % 3 != 0) continue;
      if (identical && rank > 0) {
        inputs[rank].indices = inputs[0].indices;
      } else {
        std::vector<std::uint32_t>& indices = inputs[rank].indices;
        const std::uint64_t count = random_.below(2 * settings.k + 1);
        for (std::uint64_t i = 0; i < count; ++i) {
          const std::uint64_t begin = silent == 1 ? begins[rank % clusters] : begins[random_.below(clusters)];
          indices.push_back(static_cast<std::uint32_t>(std::min(n - 1, begin + random_.below(width))));
        }
        std::ranges::sort(indices);
        indices.erase(std::ranges::unique(indices).begin(), indices.end());
      }
      for (std::size_t i = 0; i < inputs[rank].indices.size(); ++i) inputs[rank].values.push_back(scale_ * value(kind));
    }
    return inputs;
  }

  Rank size = 1;
  std::uint64_t n = 1;
  OkTopkSettings settings;

 private:
  float value(std::uint64_t kind) {
    if (kind == 0) return random_.below(2) == 0 ? 1.0F : -1.0F;
    if (kind == 1) return static_cast<float>(std::ldexp(1.0 + random_.uniform(), static_cast<int>(random_.below(200)) - 100));
    if (kind == 2) return 1.0F + 1e-6F * static_cast<float>(random_.below(8));  // they differ in the last bits
    return static_cast<float>(random_.uniform() - 0.5);
  }

  Random random_;
  float scale_ = 1.0F;
};

void check_calls(Adversary adversary, std::uint64_t seed, int calls = 5) {
  OkTopkState state;
  for (int time = 0; time < calls; ++time) {
    const auto inputs = adversary.next();
    const auto results = call(seed % 2 == 0 ? World::simulated : World::local, inputs, adversary.n, adversary.settings, state,
                              Reduction::sum, seed % 3 == 0 ? IndexFormat::packed : IndexFormat::raw32, seed);
    check_call(inputs, adversary.n, adversary.settings, Reduction::sum, results);
    state = results[0].state;
  }
}

TEST("no call of 10,000 breaks a bound, whatever the ranks hold") {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) check_calls(Adversary(seed), seed);
}

TEST("nor does one whose messages have headers") {
  for (std::uint64_t seed = 0; seed < 120; ++seed) {
    check_calls(Adversary(seed, static_cast<Rank>(2 + seed % 7), 4000), seed);
  }
  for (std::uint64_t seed = 0; seed < 6; ++seed) check_calls(Adversary(seed, 2, 100'000), seed);
}

// Spread entries, which the next call may send uncounted, until some ranks lean towards one place.
TEST("nor does one that counts nothing, or that begins again") {
  int uncounted = 0;
  int again = 0;
  for (std::uint64_t seed = 0; seed < 120; ++seed) {
    Random random(seed);
    const auto size = static_cast<Rank>(2 + random.below(8));
    const std::uint64_t k = size * (36 + random.below(200));
    const std::uint64_t n = k * (2 + random.below(60));
    const OkTopkSettings settings{.k = k, .boundaries_every = 2 + random.below(30), .threshold_every = 2 + random.below(30)};
    OkTopkState state;
    for (int time = 0; time < 8; ++time) {
      const bool leans = time > 1 && random.below(3) == 0;
      const std::uint64_t place = random.below(n);
      std::vector<Input<float>> inputs(size);
      for (Rank rank = 0; rank < size; ++rank) {
        const std::uint64_t count = random.below(10) == 0 ? random.below(3) : k / 8 + random.below(2 * k);
        const std::uint64_t width = leans && random.below(2) == 0 ? 1 + n / (2 * size) : n;
        auto& [indices, values] = inputs[rank];
        for (std::uint64_t i = 0; i < count; ++i) {
          indices.push_back(static_cast<std::uint32_t>((place + random.below(width)) % n));
        }
        std::ranges::sort(indices);
        indices.erase(std::ranges::unique(indices).begin(), indices.end());
        for (std::size_t i = 0; i < indices.size(); ++i) values.push_back(static_cast<float>(random.uniform() - 0.4));
      }
      const bool is_due = state.calls % settings.boundaries_every == 0 || state.calls % settings.threshold_every == 0;
      const bool goes_uncounted = state.spread && !is_due;
      const auto results = call(seed % 2 == 0 ? World::simulated : World::local, inputs, n, settings, state, Reduction::sum,
                                seed % 3 == 0 ? IndexFormat::packed : IndexFormat::raw32, seed);
      check_call(inputs, n, settings, Reduction::sum, results);
      uncounted += goes_uncounted ? 1 : 0;
      again += goes_uncounted && results[0].report.cut ? 1 : 0;
      state = results[0].state;
    }
  }
  EXPECT(uncounted >= 120);
  EXPECT(again >= 24);
}

TEST("nor does one among up to 1,024 ranks") {
  check_calls(Adversary(0, 1024, 20), 0, 2);
  check_calls(Adversary(2, 1024), 2, 2);
  check_calls(Adversary(4, 257), 4, 2);
}

TEST("a call that cuts no slices and keeps its threshold moves 6.5 times 4k' bytes at most, up to k'/4 ranks") {
  for (const std::uint64_t k : {100U, 1000U, 2000U, 4000U, 16'000U, 50'000U, 250'000U}) {
    for (Rank size = 2; size <= 1024 && 4 * size <= k; ++size) {
      for (const std::uint64_t n : {2 * k, 100 * k, 1000 * k}) {
        const OkTopkSteps none{.cut = false, .exact = false, .balanced = false};
        const OkTopkSteps balanced{.cut = false, .exact = false, .balanced = true};
        EXPECT(2 * oktopk_bytes_most<float>(k, k, size, n, none) <= 13 * 4 * k);
        EXPECT(oktopk_bytes_most<float>(k, k, size, n, balanced) <= 7 * 4 * k);
      }
    }
  }
}

}  // namespace
