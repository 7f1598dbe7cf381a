#include "kernels/select.hpp"

#include <algorithm>
#include <cmath>

#include "kernel_samples.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using samples::Guarded;

struct Selected {
  std::size_t count;
  std::vector<std::uint32_t> residual, indices, values;

  friend bool operator==(const Selected&, const Selected&) = default;
};

using kernels::Side;
using Select = std::size_t(std::span<float>, std::span<const float>, std::int32_t, Side, std::uint32_t,
                           kernels::EntriesOut<float>, kernels::Moments*, std::span<const float>);

Selected run(Select* select, const std::vector<float>& residual, const std::vector<float>& gradient, float threshold,
             Side side, std::size_t capacity, std::size_t shift, bool with_moments = false, bool apart = false) {
  constexpr std::uint32_t kOffset = 7;
  Guarded<float> sums(apart ? std::vector<float>(residual.size(), 9.0F) : residual, shift);
  Guarded<float> addend(gradient, shift), before(residual, shift);
  Guarded<std::uint32_t> indices(capacity, shift);
  Guarded<float> values(capacity, shift);
  kernels::Moments moments;
  const std::size_t count = select(sums.span(), addend.span(), kernels::key_of_threshold(threshold, side), side, kOffset,
                                   {indices.span(), values.span()}, with_moments ? &moments : nullptr,
                                   apart ? before.span() : std::span<const float>());
  EXPECT_EQ(samples::bits(before.copy()), samples::bits(residual));
  EXPECT(before.intact() && sums.intact() && addend.intact() && indices.intact() && values.intact());
  EXPECT_EQ(samples::bits(addend.copy()), samples::bits(gradient));
  const std::size_t written = std::min(count, capacity);
  auto kept_indices = indices.copy();
  auto kept_values = values.copy();
  kept_indices.resize(written);
  kept_values.resize(written);
  return {count, samples::bits(sums.copy()), kept_indices, samples::bits(kept_values)};
}

TEST("selecting has the results of the reference at every level, size, start, side, threshold and capacity") {
  std::mt19937 random(4);
  for (const std::size_t size : samples::kSizes) {
    const auto residual = samples::awkward_values<float>(random, size);
    for (const auto& gradient : {samples::awkward_values<float>(random, size, false), std::vector<float>()}) {
      for (const Side side : {Side::both, Side::positive, Side::negative}) {
        for (const float threshold : {0.0F, -1.0F, 0.5F, 1.0F, 2.5F, 1e30F}) {
          const Selected all =
              run(kernels::reference::accumulate_select, residual, gradient, threshold, side, size, 0);
          for (const std::size_t capacity : {size, all.count, all.count / 2, all.count + 1, std::size_t{0}}) {
            const Selected expected =
                run(kernels::reference::accumulate_select, residual, gradient, threshold, side, capacity, 0);
            EXPECT_EQ(expected.count, all.count);
            samples::at_every_level([&] {
              for (const std::size_t shift : {0, 4, 44}) {
                for (const bool with_moments : {false, true}) {
                  EXPECT(run(kernels::accumulate_select, residual, gradient, threshold, side, capacity, shift,
                             with_moments) == expected);
                  if (gradient.empty()) continue;
                  EXPECT(run(kernels::accumulate_select, residual, gradient, threshold, side, capacity, shift,
                             with_moments, true) == expected);
                }
              }
            });
          }
        }
      }
    }
  }
}

std::size_t select_both(std::vector<float>& residual, const std::vector<float>& gradient, float threshold,
                        std::uint32_t offset, std::vector<std::uint32_t>& indices, std::vector<float>& values) {
  return kernels::accumulate_select(residual, gradient, kernels::key_of_threshold(threshold, Side::both), Side::both,
                                    offset, {indices, values});
}

TEST("what is selected and what stays make up residual + gradient") {
  std::mt19937 random(5);
  const std::size_t size = 100'000;
  std::normal_distribution<float> normal;
  std::vector<float> residual(size), gradient(size);
  for (float& value : residual) value = normal(random);
  for (float& value : gradient) value = normal(random);
  samples::at_every_level([&] {
    std::vector<float> left = residual, values(size);
    std::vector<std::uint32_t> indices(size);
    const std::size_t count = select_both(left, gradient, 3.5F, 0, indices, values);
    EXPECT(count > 0 && count < size / 20);
    for (const float value : left) EXPECT(std::abs(value) < 3.5F);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_EQ(left[indices[i]], 0.0F);
      left[indices[i]] = values[i];
    }
    for (std::size_t i = 0; i < size; ++i) EXPECT_EQ(left[i], residual[i] + gradient[i]);
  });
}

TEST("an entry equal to the threshold is selected, a zero threshold selects zeros, a NaN never hides") {
  const float nan = std::bit_cast<float>(0x7fc00000U);
  const std::vector<float> gradient{2.0F, -2.0F, 1.9999999F, 0.0F, -0.0F, nan};
  samples::at_every_level([&] {
    std::vector<float> residual(gradient.size()), values(gradient.size());
    std::vector<std::uint32_t> indices(gradient.size());
    EXPECT_EQ(select_both(residual, gradient, 2.0F, 10, indices, values), 3);
    EXPECT_EQ(indices[0], 10);
    EXPECT_EQ(indices[1], 11);
    EXPECT_EQ(indices[2], 15);
    EXPECT(std::isnan(values[2]) && residual[5] == 0.0F);
    residual.assign(gradient.size(), 0.0F);
    EXPECT_EQ(select_both(residual, gradient, 0.0F, 0, indices, values), gradient.size());
  });
}

TEST("of one sign neither zeros nor the other sign are selected, whatever the threshold") {
  const float nan = std::bit_cast<float>(0xffc00000U);
  const std::vector<float> gradient{2.0F, -2.0F, 1e-40F, 0.0F, -0.0F, nan, -1.0F};
  samples::at_every_level([&] {
    for (const auto& [side, expected] : {std::pair{Side::positive, std::vector<std::uint32_t>{0, 2}},
                                         std::pair{Side::negative, std::vector<std::uint32_t>{1, 5, 6}}}) {
      std::vector<float> residual = gradient, values(8);
      std::vector<std::uint32_t> indices(8);
      EXPECT_EQ(kernels::accumulate_select(residual, {}, 0, side, 0, {indices, values}), expected.size());
      indices.resize(expected.size());
      EXPECT(indices == expected);
    }
  });
}

TEST("the offset may reach the last index there is") {
  std::vector<float> residual(40), gradient(40, 1.0F), values(40);
  std::vector<std::uint32_t> indices(40);
  samples::at_every_level([&] {
    residual.assign(40, 0.0F);
    EXPECT_EQ(select_both(residual, gradient, 1.0F, 0xffffffffU - 39U, indices, values), 40);
    EXPECT_EQ(indices[39], 0xffffffffU);
  });
}

TEST("moments are those of the sums, with the same bits at every level") {
  std::mt19937 random(9);
  for (const std::size_t size : samples::kSizes) {
    const auto residual = samples::awkward_values<float>(random, size, false);
    std::vector<float> gradient(size);
    for (float& value : gradient) value = static_cast<float>(random() % 100) / 7.0F - 7.0F;
    for (const Side side : {Side::both, Side::positive, Side::negative}) {
      std::vector<float> sums = residual;
      kernels::Moments expected;
      kernels::reference::accumulate_select(sums, gradient, kernels::kHighestKey, side, 0, {}, &expected);
      std::size_t count = 0;
      double total = 0.0;
      float max = 0.0F, largest = 0.0F;
      for (const float sum : sums) {
        largest = std::max(largest, std::abs(sum));
        const float own = side == Side::both ? std::abs(sum) : side == Side::positive ? sum : -sum;
        if (side == Side::both || own > 0.0F) {
          ++count;
          total += static_cast<double>(own);
          max = std::max(max, own);
        }
      }
      EXPECT_EQ(expected.count, count);
      EXPECT(expected.sum == total || std::abs(expected.sum - total) <= 1e-12 * total);
      EXPECT_EQ(expected.max, max);
      EXPECT_EQ(expected.largest, largest);
      samples::at_every_level([&] {
        for (const bool adds : {true, false}) {
          std::vector<float> given = adds ? residual : sums;
          const auto found =
              kernels::accumulate_moments(given, adds ? std::span<const float>(gradient) : std::span<const float>(), side);
          EXPECT_EQ(samples::bits(given), samples::bits(sums));
          EXPECT_EQ(found.count, expected.count);
          EXPECT_EQ(std::bit_cast<std::uint64_t>(found.sum), std::bit_cast<std::uint64_t>(expected.sum));
          EXPECT(found.max == expected.max && found.largest == expected.largest);
        }
      });
    }
  }
}

}  // namespace
