#include "kernels/ranked.hpp"

#include <algorithm>
#include <cmath>

#include "kernel_samples.hpp"
#include "kernels/cut.hpp"
#include "kernels/select.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using kernels::Chosen;
using kernels::EntriesOut;
using kernels::Side;
using samples::Guarded;

using Floats = std::vector<float>;

struct Outcome {
  std::size_t count;
  std::uint32_t threshold;
  std::vector<std::uint32_t> indices, values, residual;

  friend bool operator==(const Outcome&, const Outcome&) = default;
};

template <class Select>
Outcome run(Select select, const Floats& residual, const Floats& gradient, std::size_t capacity) {
  Guarded<float> sums(residual, 4), values(capacity);
  Guarded<std::uint32_t> indices(capacity);
  const Chosen chosen = select(sums.span(), std::span<const float>(gradient), {indices.span(), values.span()});
  EXPECT(sums.intact() && values.intact() && indices.intact());
  auto kept_indices = indices.copy();
  auto kept_values = values.copy();
  kept_indices.resize(chosen.count);
  kept_values.resize(chosen.count);
  for (const float left : sums.copy()) EXPECT(!(std::abs(left) > chosen.largest));
  return {chosen.count, std::bit_cast<std::uint32_t>(chosen.threshold), kept_indices, samples::bits(kept_values),
          samples::bits(sums.copy())};
}

// Exact top-k and search against the reference, which takes no sample; trimming against exact top-k.
void expect_reference(const Floats& residual, const Floats& gradient, std::size_t k) {
  const std::size_t twice = std::min(2 * k, residual.size());
  for (const Side side : {Side::both, Side::positive, Side::negative}) {
    const Outcome exact = run(
        [&](auto sums, auto addend, EntriesOut<float> out) {
          return kernels::reference::accumulate_topk(sums, addend, k, side, 3, out);
        },
        residual, gradient, k);
    EXPECT(side == Side::both ? exact.count == k : exact.count <= k);
    const Outcome searched = run(
        [&](auto sums, auto addend, EntriesOut<float> out) {
          return kernels::reference::accumulate_search(sums, addend, k, 1e-3, side, 3, out);
        },
        residual, gradient, twice);
    EXPECT(searched.count <= twice && searched.count >= exact.count);
    samples::at_every_level([&] {
      EXPECT(run([&](auto sums, auto addend, EntriesOut<float> out) {
               return kernels::accumulate_topk(sums, addend, k, side, 3, out);
             }, residual, gradient, k) == exact);
      for (const double step : {0.2, 0.3, 0.05}) {
        EXPECT(run([&](auto sums, auto addend, EntriesOut<float> out) {
                 return kernels::accumulate_trimmed(sums, addend, k, step, side, 3, out);
               }, residual, gradient, k) == exact);
      }
      EXPECT(run([&](auto sums, auto addend, EntriesOut<float> out) {
               return kernels::accumulate_search(sums, addend, k, 1e-3, side, 3, out);
             }, residual, gradient, twice) == searched);
    });
  }
}

TEST("selections by rank have the results of the reference on short awkward inputs") {
  std::mt19937 random(1);
  for (const std::size_t size : samples::kSizes) {
    if (size == 0) continue;
    for (const bool with_nan : {false, true}) {
      const auto residual = samples::awkward_values<float>(random, size, with_nan);
      for (const auto& gradient : {samples::integers<float>(random, size), Floats()}) {
        for (const std::size_t k : {std::size_t{1}, (size + 99) / 100, (size + 3) / 4, size}) {
          expect_reference(residual, gradient, k);
        }
      }
    }
  }
}

TEST("selections by rank have the results of the reference on long inputs, also where a sample misleads") {
  std::mt19937 random(7);
  const std::size_t size = 40'003;
  std::normal_distribution<float> normal;
  std::vector<Floats> inputs(8, Floats(size));
  for (float& value : inputs[0]) value = normal(random) * 1e-4F;
  for (float& value : inputs[1]) value = std::exp(8.0F * normal(random));
  for (float& value : inputs[2]) value = 0.5F;
  for (std::size_t i = 0; i < size; i += 1000) inputs[3][i] = normal(random);
  for (std::size_t i = 0; i < size; ++i) inputs[4][i] = i < 900 ? 1e6F + static_cast<float>(i) : 1.0F;  // a clump
  for (float& value : inputs[5]) value = static_cast<float>(random() % 3);
  inputs[6][30'000] = INFINITY;
  inputs[6][3] = NAN;
  inputs[7][35'000] = -3.0F;  // one spike among zeros
  for (const Floats& x : inputs) {
    for (const std::size_t k : {std::size_t{1}, size / 1000, size / 100, size / 10, size / 2}) {
      expect_reference(x, Floats(), k);
    }
  }
  Floats gradient(size);
  for (float& value : gradient) value = normal(random);
  for (const std::size_t k : {size / 1000, size / 100}) expect_reference(inputs[1], gradient, k);
}

TEST("selections by rank are exact where the sample sees only the largest, or none of them") {
  constexpr std::size_t kSize = 40'003;
  Floats high_seen(kSize), low_seen(kSize);
  for (std::size_t i = 0; i < kSize; ++i) {
    high_seen[i] = 1.0F + 1e-6F * static_cast<float>(i);
    low_seen[i] = 1.0F + static_cast<float>(i);
  }
  std::uint64_t state = 0x9e3779b97f4a7c15U;  // the positions that candidates.cpp draws
  for (std::size_t i = 0; i < 8192; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const std::size_t position = ((state >> 32) * kSize) >> 32;
    high_seen[position] = 100.0F + static_cast<float>(i);
    low_seen[position] = 0.001F;
  }
  for (const std::size_t k : {std::size_t{1}, std::size_t{500}, std::size_t{10'000}}) {
    expect_reference(high_seen, Floats(), k);
    expect_reference(low_seen, Floats(), k);
  }
}

#ifdef TELEGRAD_KERNELS_X86
TEST("denormals are ranked like all numbers, also where arithmetic flushes them to zero") {
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  Floats residual(100, 0.0F);
  for (std::size_t i = 0; i < 20; ++i) residual[3 * i] = static_cast<float>(i + 1) * 1.5e-45F;
  const unsigned before = __builtin_ia32_stmxcsr();
  samples::at_every_level([&] {
    Floats left = residual, values(40);
    std::vector<std::uint32_t> indices(40);
    __builtin_ia32_ldmxcsr(before | kFlushToZero | kDenormalsAreZero);
    const Chosen chosen = kernels::accumulate_topk(left, {}, 4, Side::both, 0, {indices, values});
    const std::size_t more = kernels::accumulate_select(left, {}, kernels::key_of_threshold(residual[30], Side::both),
                                                        Side::both, 0, {indices, values});
    __builtin_ia32_ldmxcsr(before);
    EXPECT_EQ(chosen.count, 4);
    EXPECT(indices[0] == 30 && more == 6);  // of the 20, all from the eleventh on but the last four
  });
}
#endif

TEST("a search selects k to 2k of a smooth distribution, with a threshold between them") {
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  Floats residual(100'000);
  for (float& value : residual) value = normal(random);
  for (const std::size_t k : {10, 100, 1000, 10'000}) {
    Floats left = residual, values(2 * k);
    std::vector<std::uint32_t> indices(2 * k);
    const Chosen chosen = kernels::accumulate_search(left, {}, k, 1e-3, Side::both, 0, {indices, values});
    EXPECT(chosen.count >= k && chosen.count <= 2 * k);
    for (std::size_t i = 0; i < chosen.count; ++i) EXPECT(std::abs(values[i]) >= chosen.threshold);
    for (const float value : left) EXPECT(std::abs(value) < chosen.threshold);
  }
}

}  // namespace
