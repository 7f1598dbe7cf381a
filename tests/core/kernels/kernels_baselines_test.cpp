// Selections per bucket, at random, and by the estimate of a normal distribution.
#include <algorithm>
#include <cmath>

#include "kernel_samples.hpp"
#include "kernels/buckets.hpp"
#include "kernels/normal.hpp"
#include "kernels/random_subset.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using kernels::Chosen;
using kernels::Draw;
using samples::Guarded;

using Floats = std::vector<float>;

TEST("selections per bucket have the results of the reference at every level") {
  std::mt19937 random(1);
  for (const std::size_t size : samples::kSizes) {
    for (const std::size_t bucket : {1, 5, 32, 64, 512, 10'000}) {
      const std::size_t rest = size % bucket;
      for (const std::size_t share : {1, 3, 100}) {
        const std::size_t per_bucket = std::min<std::size_t>(share, bucket), of_last = std::min(share, rest);
        const std::size_t count = size / bucket * per_bucket + of_last;
        for (const bool awkward : {true, false}) {
          const auto residual =
              awkward ? samples::awkward_values<float>(random, size) : samples::integers<float>(random, size);
          const auto gradient = samples::integers<float>(random, size);
          Floats left = residual, values(count);
          std::vector<std::uint32_t> indices(count);
          const Chosen expected = kernels::reference::accumulate_buckets(left, gradient, bucket, per_bucket, of_last, 9,
                                                                         {indices, values});
          EXPECT_EQ(expected.count, count);
          samples::at_every_level([&] {
            Guarded<float> own(residual, 4), own_values(count);
            Guarded<std::uint32_t> own_indices(count);
            const Chosen chosen = kernels::accumulate_buckets(own.span(), gradient, bucket, per_bucket, of_last, 9,
                                                              {own_indices.span(), own_values.span()});
            EXPECT(own.intact() && own_values.intact() && own_indices.intact());
            EXPECT_EQ(chosen.count, count);
            EXPECT(own_indices.copy() == indices);
            EXPECT_EQ(samples::bits(own_values.copy()), samples::bits(values));
            EXPECT_EQ(samples::bits(own.copy()), samples::bits(left));
            for (const float value : own.copy()) EXPECT(!(std::abs(value) > chosen.largest));
          });
        }
      }
    }
  }
}

TEST("a random subset is the reference's at every level: ascending, and as large as asked for") {
  for (const std::size_t size : {1, 2, 63, 64, 65, 1000, 5000}) {
    for (const std::size_t k : {std::size_t{0}, std::size_t{1}, size / 10, size / 2, size - 1, size}) {
      const Draw draw{0x123456789abcdefU, 3, 2, static_cast<std::uint32_t>(size)};
      std::vector<std::uint32_t> expected(k);
      kernels::reference::random_subset(draw, size, expected);
      EXPECT(std::is_sorted(expected.begin(), expected.end()));
      EXPECT(std::adjacent_find(expected.begin(), expected.end()) == expected.end());
      EXPECT(expected.empty() || expected.back() < size);
      samples::at_every_level([&] {
        Guarded<std::uint32_t> found(k);
        kernels::random_subset(draw, size, found.span());
        EXPECT(found.intact() && found.copy() == expected);
      });
    }
  }
}

TEST("a random subset depends on seed, call, rank and vector") {
  std::vector<std::vector<std::uint32_t>> found;
  for (const Draw& draw : {Draw{1, 0, 0, 0}, Draw{2, 0, 0, 0}, Draw{1ULL << 32, 0, 0, 0}, Draw{1, 1, 0, 0},
                           Draw{1, 0, 1, 0}, Draw{1, 0, 0, 1}}) {
    found.emplace_back(100);
    kernels::random_subset(draw, 100'000, found.back());
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT(found[i] != found[j]);
  }
}

TEST("every index is as likely as any other") {
  constexpr std::size_t kSize = 100, kCalls = 20'000;
  for (const std::size_t k : {std::size_t{10}, std::size_t{80}}) {
    std::vector<std::uint32_t> times(kSize), indices(k);
    for (std::uint32_t call = 0; call < kCalls; ++call) {
      kernels::random_subset({5, call, 0, 0}, kSize, indices);
      for (const std::uint32_t index : indices) ++times[index];
    }
    const double share = static_cast<double>(k) / kSize, expected = share * kCalls;
    for (const std::uint32_t count : times) {  // five standard deviations; the draws are fixed
      EXPECT(std::abs(count - expected) < 5.0 * std::sqrt(expected * (1.0 - share)));
    }
  }
}

TEST("a random selection moves what it draws out of residual + gradient") {
  std::mt19937 random(2);
  const auto residual = samples::integers<float>(random, 1000), gradient = samples::integers<float>(random, 1000);
  Floats left = residual, values(50);
  std::vector<std::uint32_t> indices(50), drawn(50);
  const Draw draw{7, 1, 0, 0};
  const Chosen chosen = kernels::accumulate_random(left, gradient, draw, 100, {indices, values});
  kernels::random_subset(draw, 1000, drawn);
  EXPECT_EQ(chosen.count, 50);
  float largest = 0.0F;
  for (std::size_t i = 0; i < 1000; ++i) largest = std::max(largest, std::abs(residual[i] + gradient[i]));
  EXPECT_EQ(chosen.largest, largest);
  for (std::size_t i = 0; i < 50; ++i) {
    EXPECT_EQ(indices[i], drawn[i] + 100);
    EXPECT_EQ(left[drawn[i]], 0.0F);
    left[drawn[i]] = values[i];
  }
  for (std::size_t i = 0; i < 1000; ++i) EXPECT_EQ(left[i], residual[i] + gradient[i]);
}

TEST("the normal distribution of sums is the reference's at every level, and right") {
  std::mt19937 random(3);
  for (const std::size_t size : samples::kSizes) {
    if (size == 0) continue;
    const auto residual = samples::integers<float>(random, size, 100);
    for (const auto& gradient : {samples::integers<float>(random, size, 100), Floats()}) {
      Floats sums = residual;
      const auto expected = kernels::reference::accumulate_normal(sums, gradient);
      double first = 0.0, second = 0.0;
      for (std::size_t i = 0; i < size; ++i) {
        EXPECT_EQ(sums[i], residual[i] + (gradient.empty() ? 0.0F : gradient[i]));
        first += static_cast<double>(sums[i]);
        second += static_cast<double>(sums[i]) * static_cast<double>(sums[i]);  // exact: integers
      }
      const double mean = first / static_cast<double>(size);
      EXPECT_EQ(expected.mean, mean);
      EXPECT(std::abs(expected.deviation - std::sqrt(second / static_cast<double>(size) - mean * mean)) < 1e-9);
      samples::at_every_level([&] {
        Guarded<float> own(residual, 4);
        const auto found = kernels::accumulate_normal(own.span(), gradient);
        EXPECT(own.intact() && own.copy() == sums);
        EXPECT(found.mean == expected.mean && found.deviation == expected.deviation);
      });
    }
  }
}

TEST("what is not finite makes the normal distribution NaN") {
  for (const float value : {INFINITY, -INFINITY, NAN}) {
    samples::at_every_level([&] {
      Floats sums(40, 1.0F);
      sums[33] = value;
      EXPECT(!std::isfinite(kernels::accumulate_normal(sums, {}).deviation));
    });
  }
}

}  // namespace
