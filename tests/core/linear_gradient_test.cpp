// Losses against differences of themselves; gradients of batches against dense sums in f64.
#include "linear/gradient.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <vector>

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

struct Sample {
  std::vector<std::uint64_t> offsets{0};
  std::vector<std::uint32_t> indices;
  std::vector<float> values, targets, weights;

  Sample(std::size_t features, std::size_t rows, unsigned seed) : weights(features) {
    std::mt19937 random(seed);
    const auto number = [&] { return static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 500; };
    std::generate(weights.begin(), weights.end(), number);
    for (std::size_t row = 0; row < rows; ++row) {
      std::map<std::uint32_t, float> entries;
      for (std::size_t entry = features == 0 ? 0 : random() % 12; entry > 0; --entry) {
        entries[static_cast<std::uint32_t>(random() % features)] = number();
      }
      for (const auto& [index, value] : entries) {
        indices.push_back(index);
        values.push_back(value);
      }
      offsets.push_back(indices.size());
      targets.push_back(random() % 2 == 0 ? -1.0F : 1.0F);
    }
  }

  RowsView view() const { return {offsets, indices, values}; }
};

TEST("the gradient of a batch is the sum of its rows', sorted, and forgotten once taken") {
  for (const std::size_t features : {1UL, 63UL, 64UL, 65UL, 4096UL, 4097UL, 300'000UL}) {
    const Sample sample(features, 60, static_cast<unsigned>(features));
    const ModelView model{sample.weights, 0.75, -0.125};
    BatchGradient gradient(features);
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
      REQUIRE(gradient.entries() == expected.size());
      std::vector<std::uint32_t> indices(expected.size());
      std::vector<float> values(expected.size());
      gradient.take(indices, values);
      std::size_t i = 0;
      for (const auto& [index, value] : expected) {
        EXPECT_EQ(indices[i], index);
        EXPECT_NEAR(static_cast<double>(values[i++]), value, 1e-4);
      }
      EXPECT_EQ(gradient.entries(), 0);
    }
  }
}

TEST("a batch of no rows, and rows of no entries") {
  const Sample sample(0, 3, 1);
  BatchGradient gradient(0);
  const std::vector<std::uint64_t> all{0, 1, 2};
  EXPECT_EQ(gradient.add(sample.view(), sample.targets, {}, {sample.weights}, Loss::logistic).loss, 0.0);
  EXPECT_NEAR(gradient.add(sample.view(), sample.targets, all, {sample.weights}, Loss::logistic).loss,
              3 * std::log(2.0), 1e-12);
  gradient.take({}, {});
  EXPECT_EQ(gradient.entries(), 0);
}

TEST("scores of consecutive rows, and what an update subtracts") {
  const Sample sample(50, 9, 3);
  const ModelView model{sample.weights, 2, 1};
  std::vector<float> scores(5);
  score_rows(sample.view(), 3, model, scores);
  for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(scores[i], static_cast<float>(score_of(sample.view(), 3 + i, model)));

  std::vector<float> weights{1, 2, 3, 4};
  subtract(weights, std::vector<std::uint32_t>{1, 3}, std::vector<float>{2, -2}, 0.5);
  EXPECT(weights == (std::vector<float>{1, 1, 3, 5}));
  subtract(weights, {}, std::vector<float>{1, 1, 1, 1}, 2);
  EXPECT(weights == (std::vector<float>{-1, -1, 1, 3}));
}

}  // namespace
