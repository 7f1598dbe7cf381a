// Losses against differences of themselves; gradients of batches against dense sums in f64.
#include "linear/gradient.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "linear_sample.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad::linear;

constexpr Loss kLosses[] = {Loss::logistic, Loss::hinge, Loss::squared_hinge, Loss::squared_error};

TEST("a loss's slope is what it grows by") {
  for (const Loss loss : kLosses) {
    for (const double target : {-1.0, 1.0}) {
      for (double score = -3.03; score < 3; score += 0.1) {
        constexpr double kStep = 1e-6;
        const double grown = loss_at(loss, score + kStep, target).value - loss_at(loss, score - kStep, target).value;
        EXPECT_NEAR(loss_at(loss, score, target).slope, grown / (2 * kStep), 1e-6);
      }
    }
  }
}

TEST("a slope alone has the bits of a loss's slope") {
  for (const Loss loss : kLosses) {
    for (double score = -50; score < 50; score += 0.37) {
      EXPECT_EQ(slope_at(loss, score, -1), loss_at(loss, score, -1).slope);
    }
  }
}

TEST("losses of known scores, however large") {
  EXPECT_NEAR(loss_at(Loss::logistic, 0, 1).value, std::log(2.0), 1e-15);
  EXPECT_EQ(loss_at(Loss::logistic, -5000, 1).value, 5000.0);
  EXPECT_EQ(loss_at(Loss::logistic, -5000, 1).slope, -1.0);
  EXPECT_EQ(loss_at(Loss::logistic, 5000, 1).value, 0.0);
  EXPECT_NEAR(loss_at(Loss::logistic, 40, 1).value, std::exp(-40.0), 1e-20);
  EXPECT_EQ(loss_at(Loss::hinge, 1, 1).value, 0.0);
  EXPECT_EQ(loss_at(Loss::hinge, 1, 1).slope, 0.0);
  EXPECT_EQ(loss_at(Loss::squared_hinge, -1, 1).value, 4.0);
  EXPECT_EQ(loss_at(Loss::squared_error, 3, 1).value, 2.0);
}

TEST("a score that is no number has neither loss nor slope that are") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const Loss loss : kLosses) {
    for (const double target : {-1.0, 1.0}) {
      EXPECT(std::isnan(loss_at(loss, nan, target).value));
      EXPECT(std::isnan(loss_at(loss, nan, target).slope));
      EXPECT(std::isnan(slope_at(loss, nan, target)));
    }
  }
}

TEST("the gradient of a batch is the sum of its rows', sorted, and forgotten once taken") {
  for (const std::size_t features : {1UL, 63UL, 64UL, 65UL, 4096UL, 4097UL, 300'000UL}) {
    const Sample sample(features, 60, static_cast<unsigned>(features));
    const ModelView model{sample.weights, 0.75, -0.125};
    Team alone(1);
    BatchGradient gradient(features, alone);
    for (const Loss loss : kLosses) {
      std::vector<std::uint64_t> chosen;
      for (std::uint64_t row = 0; row < 60; row += loss == Loss::hinge ? 3 : 2) chosen.push_back(row);
      std::map<std::uint32_t, double> expected;
      double loss_sum = 0, slope_sum = 0;
      for (const std::uint64_t row : chosen) {
        double score = 0;
        for (std::uint64_t i = sample.offsets[row]; i < sample.offsets[row + 1]; ++i) {
          score += 0.75 * static_cast<double>(sample.weights[sample.indices[i]]) * static_cast<double>(sample.values[i]);
        }
        EXPECT_NEAR(score_of(sample.view(), row, model), score - 0.125, 1e-12);
        const LossAt at = loss_at(loss, score_of(sample.view(), row, model), sample.targets[row]);
        loss_sum += at.value;
        slope_sum += at.slope;
        for (std::uint64_t i = sample.offsets[row]; at.slope != 0 && i < sample.offsets[row + 1]; ++i) {
          expected[sample.indices[i]] += at.slope * static_cast<double>(sample.values[i]);
        }
      }
      const auto sums = gradient.add(sample.view(), sample.targets, chosen, model, loss);
      EXPECT_EQ(sums.loss, loss_sum);
      EXPECT_EQ(sums.slope, slope_sum);
      REQUIRE(gradient.collect() == expected.size());
      std::vector<std::uint32_t> indices(expected.size());
      std::vector<float> values(expected.size());
      gradient.take(indices, values);
      std::size_t i = 0;
      for (const auto& [index, value] : expected) {
        EXPECT_EQ(indices[i], index);
        EXPECT_NEAR(static_cast<double>(values[i++]), value, 1e-4);
      }
      EXPECT_EQ(gradient.collect(), 0);
    }
  }
}

TEST("a batch of no rows, and rows of no entries") {
  const Sample sample(0, 3, 1);
  Team team(2);
  BatchGradient gradient(0, team);
  const std::vector<std::uint64_t> all{0, 1, 2};
  EXPECT_EQ(gradient.add(sample.view(), sample.targets, {}, {sample.weights}, Loss::logistic).loss, 0.0);
  EXPECT_NEAR(gradient.add(sample.view(), sample.targets, all, {sample.weights}, Loss::logistic).loss,
              3 * std::log(2.0), 1e-12);
  gradient.take({}, {});
  EXPECT_EQ(gradient.collect(), 0);
}

TEST("no bit depends on how many threads there are") {
  for (const std::size_t features : {1UL, 4095UL, 4097UL, 20'000UL, 300'000UL}) {
    const Sample sample(features, 400, static_cast<unsigned>(features), 200);
    const ModelView model{sample.weights, 0.75, -0.125};
    std::vector<std::uint64_t> chosen;
    for (std::uint64_t row = 0; row < 400; ++row) chosen.push_back(row * 7 % 400);
    Team alone(1);
    BatchGradient expected(features, alone);
    for (const Loss loss : kLosses) {
      const auto sums = expected.add(sample.view(), sample.targets, chosen, model, loss);
      std::vector<std::uint32_t> indices(expected.collect());
      std::vector<float> values(indices.size());
      expected.take(indices, values);
      for (const std::size_t threads : {2UL, 3UL, 7UL}) {
        Team team(threads);
        BatchGradient gradient(features, team);
        for (int time = 0; time < 2; ++time) {
          const std::span all(chosen);
          const auto first = gradient.add(sample.view(), sample.targets, all.first(250), model, loss);
          const auto second = gradient.add(sample.view(), sample.targets, all.subspan(250), model, loss);
          EXPECT_NEAR(first.loss + second.loss, sums.loss, 1e-9 * sums.loss);
          if (time == 0) {
            REQUIRE(gradient.collect() == indices.size());
            std::vector<std::uint32_t> found(indices.size());
            std::vector<float> found_values(indices.size());
            gradient.take(found, found_values);
            EXPECT(found == indices);
            EXPECT(found_values == values);
          } else {
            std::vector<float> drained(features);
            EXPECT(gradient.drain([&](std::size_t index, float sum) { drained[index] += sum; }) >= indices.size());
            std::vector<float> wanted(features);
            for (std::size_t i = 0; i < indices.size(); ++i) wanted[indices[i]] = values[i];
            EXPECT(drained == wanted);
          }
        }
        const auto again = gradient.add(sample.view(), sample.targets, chosen, model, loss);
        EXPECT_EQ(again.loss, sums.loss);
        EXPECT_EQ(again.slope, sums.slope);
      }
    }
  }
}

TEST("scores of consecutive rows") {
  const Sample sample(50, 9, 3);
  const ModelView model{sample.weights, 2, 1};
  std::vector<float> scores(5);
  score_rows(sample.view(), 3, model, scores);
  for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(scores[i], static_cast<float>(score_of(sample.view(), 3 + i, model)));
}

TEST("every part of a team's work is done once, time after time") {
  for (const std::size_t threads : {1UL, 2UL, 5UL}) {
    Team team(threads);
    EXPECT_EQ(team.size(), threads);
    std::vector<int> done(threads);
    for (int time = 1; time <= 200; ++time) {
      team.run([&](std::size_t part) { ++done[part]; });
      EXPECT(done == std::vector<int>(threads, time));
    }
  }
}

}  // namespace
