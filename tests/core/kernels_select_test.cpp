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

using Select = std::size_t(std::span<float>, std::span<const float>, float, std::uint32_t, std::span<std::uint32_t>,
                           std::span<float>);

Selected run(Select* select, const std::vector<float>& residual, const std::vector<float>& gradient, float threshold,
             std::uint32_t offset, std::size_t capacity, std::size_t shift) {
  Guarded<float> sums(residual, shift), addend(gradient, shift);
  Guarded<std::uint32_t> indices(capacity, shift);
  Guarded<float> values(capacity, shift);
  const std::size_t count = select(sums.span(), addend.span(), threshold, offset, indices.span(), values.span());
  EXPECT(sums.intact() && addend.intact() && indices.intact() && values.intact());
  EXPECT_EQ(samples::bits(addend.copy()), samples::bits(gradient));
  const std::size_t written = std::min(count, capacity);
  auto kept_indices = indices.copy();
  auto kept_values = values.copy();
  kept_indices.resize(written);
  kept_values.resize(written);
  return {count, samples::bits(sums.copy()), kept_indices, samples::bits(kept_values)};
}

TEST("selecting has the results of the reference at every level, size, start, threshold and capacity") {
  std::mt19937 random(4);
  for (const std::size_t size : samples::kSizes) {
    const auto residual = samples::awkward_values<float>(random, size);
    const auto gradient = samples::awkward_values<float>(random, size, false);
    for (const float threshold : {0.0F, -1.0F, 0.5F, 1.0F, 2.5F, 1e30F}) {
      const Selected all = run(kernels::reference::accumulate_select, residual, gradient, threshold, 7, size, 0);
      for (const std::size_t capacity : {size, all.count, all.count / 2, all.count + 1, std::size_t{0}}) {
        const Selected expected =
            run(kernels::reference::accumulate_select, residual, gradient, threshold, 7, capacity, 0);
        EXPECT_EQ(expected.count, all.count);
        samples::at_every_level([&] {
          for (const std::size_t shift : {0, 4, 44}) {
            EXPECT(run(kernels::accumulate_select, residual, gradient, threshold, 7, capacity, shift) == expected);
          }
        });
      }
    }
  }
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
    const std::size_t count = kernels::accumulate_select(left, gradient, 3.5F, 0, indices, values);
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
    EXPECT_EQ(kernels::accumulate_select(residual, gradient, 2.0F, 10, indices, values), 3);
    EXPECT_EQ(indices[0], 10);
    EXPECT_EQ(indices[1], 11);
    EXPECT_EQ(indices[2], 15);
    EXPECT(std::isnan(values[2]) && residual[5] == 0.0F);
    residual.assign(gradient.size(), 0.0F);
    EXPECT_EQ(kernels::accumulate_select(residual, gradient, 0.0F, 0, indices, values), gradient.size());
  });
}

TEST("the offset may reach the last index there is") {
  std::vector<float> residual(40), gradient(40, 1.0F), values(40);
  std::vector<std::uint32_t> indices(40);
  samples::at_every_level([&] {
    residual.assign(40, 0.0F);
    EXPECT_EQ(kernels::accumulate_select(residual, gradient, 1.0F, 0xffffffffU - 39U, indices, values), 40);
    EXPECT_EQ(indices[39], 0xffffffffU);
  });
}

void expect_threshold(const std::vector<float>& x, std::size_t k) {
  Guarded<float> guarded(x, 4);
  const auto expected = std::bit_cast<std::uint32_t>(kernels::reference::topk_threshold(guarded.span(), k));
  samples::at_every_level([&] {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(kernels::topk_threshold(guarded.span(), k)), expected);
  });
}

TEST("the top-k threshold is the exact k-th largest magnitude") {
  std::mt19937 random(6);
  for (const std::size_t size : samples::kSizes) {
    const auto x = samples::awkward_values<float>(random, size);
    for (const std::size_t k : {std::size_t{1}, std::size_t{2}, size / 100, size / 4, size / 2, size - 1, size}) {
      if (k >= 1 && k <= size) expect_threshold(x, k);
    }
  }
}

TEST("the top-k threshold is exact on large inputs, also where a sample misleads") {
  std::mt19937 random(7);
  const std::size_t size = 200'003;
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> inputs(6, std::vector<float>(size));
  for (float& value : inputs[0]) value = normal(random) * 1e-4F;
  for (float& value : inputs[1]) value = std::exp(8.0F * normal(random));
  for (float& value : inputs[2]) value = 0.5F;                                     // ties everywhere
  for (std::size_t i = 0; i < size; i += 1000) inputs[3][i] = normal(random);      // almost all zero
  for (std::size_t i = 0; i < size; ++i) inputs[4][i] = i < 900 ? 1e6F + static_cast<float>(i) : 1.0F;  // a clump
  for (float& value : inputs[5]) value = static_cast<float>(random() % 3);
  for (const auto& x : inputs) {
    for (const std::size_t k : {std::size_t{1}, size / 1000, size / 100, size / 10, size / 2, size}) {
      expect_threshold(x, k);
    }
  }
}

TEST("the top-k threshold is exact where the sample sees only the largest, or none of them") {
  constexpr std::size_t kSize = 200'003;
  std::vector<float> high_seen(kSize), low_seen(kSize);
  for (std::size_t i = 0; i < kSize; ++i) {
    high_seen[i] = 1.0F + 1e-6F * static_cast<float>(i);
    low_seen[i] = 1.0F + static_cast<float>(i);
  }
  std::uint64_t state = 0x9e3779b97f4a7c15U;  // the positions that topk.cpp draws
  for (std::size_t i = 0; i < 8192; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const std::size_t position = ((state >> 32) * kSize) >> 32;
    high_seen[position] = 100.0F + static_cast<float>(i);
    low_seen[position] = 0.001F;
  }
  for (const std::size_t k : {std::size_t{1}, std::size_t{500}, std::size_t{10'000}, std::size_t{30'000}}) {
    expect_threshold(high_seen, k);
    expect_threshold(low_seen, k);
  }
}

TEST("selecting with the top-k threshold selects k entries, or more where there are ties") {
  std::mt19937 random(8);
  const std::size_t size = 50'000;
  std::normal_distribution<float> normal;
  std::vector<float> gradient(size), residual(size), values(size);
  std::vector<std::uint32_t> indices(size);
  for (float& value : gradient) value = normal(random);
  const float threshold = kernels::topk_threshold(gradient, 500);
  EXPECT_EQ(kernels::accumulate_select(residual, gradient, threshold, 0, indices, values), 500);
}

}  // namespace
