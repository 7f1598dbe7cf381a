// Columns of rows: sums against dense loops in f64, the bound that steps of coordinate descent rely on, and threads.
#include "linear/columns.hpp"

#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "linear/numbering.hpp"
#include "linear_sample.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad::linear;

constexpr std::size_t kFeatures = 30, kRows = 50;

struct Dense {
  std::vector<std::vector<double>> rows;

  Dense(const Sample& sample, const std::vector<std::uint64_t>& chosen) {
    for (const std::uint64_t row : chosen) {
      rows.emplace_back(kFeatures);
      for (std::uint64_t i = sample.offsets[row]; i < sample.offsets[row + 1]; ++i) {
        rows.back()[sample.indices[i]] = static_cast<double>(sample.values[i]);
      }
    }
  }
};

TEST("derivatives of a block, its move, and a bound that holds for all of it at once") {
  const Sample sample(kFeatures, kRows, 11, 20);
  std::vector<std::uint64_t> chosen;
  for (std::uint64_t row = 0; row < kRows; ++row) {
    if (row % 5 != 0) chosen.push_back(row);
  }
  const Dense dense(sample, chosen);
  std::vector<float> targets;
  for (const std::uint64_t row : chosen) targets.push_back(sample.targets[row]);
  const std::vector<std::uint32_t> block{0, 3, 4, 11, 17, 29};
  constexpr double kBias = 0.25;
  for (const auto& [loss, bound] : {std::pair(Loss::logistic, 0.25), std::pair(Loss::squared_hinge, 2.0),
                                    std::pair(Loss::squared_error, 1.0)}) {
    std::vector<double> alone;
    for (const std::size_t threads : {1UL, 2UL, 5UL}) {
      Team team(threads);
      Columns columns(sample.view(), chosen, kFeatures, team);
      std::vector<double> scores(chosen.size());
      std::mt19937 random(3);
      for (int time = 0; time < 3; ++time) {
        std::vector<double> slopes(block.size()), curvatures(block.size());
        columns.derivatives(block, scores, targets, kBias, loss, slopes, curvatures);
        std::vector<float> changes(block.size());
        for (float& change : changes) change = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 700;
        double most = sum_losses(scores, targets, kBias, loss).loss;
        for (std::size_t i = 0; i < block.size(); ++i) {
          double slope = 0, curvature = 0;
          for (std::size_t row = 0; row < chosen.size(); ++row) {
            const double value = dense.rows[row][block[i]];
            int in_block = 0;
            for (const std::uint32_t column : block) in_block += dense.rows[row][column] != 0;
            slope += loss_at(loss, scores[row] + kBias, static_cast<double>(targets[row])).slope * value;
            curvature += in_block * value * value;
          }
          EXPECT_NEAR(slopes[i], slope, 1e-9);
          EXPECT_NEAR(curvatures[i], curvature, 1e-9);
          const auto change = static_cast<double>(changes[i]);
          most += slope * change + bound / 2 * curvature * change * change;
        }
        std::vector<double> moved = scores;
        for (std::size_t row = 0; row < chosen.size(); ++row) {
          for (std::size_t i = 0; i < block.size(); ++i) {
            moved[row] += static_cast<double>(changes[i]) * dense.rows[row][block[i]];
          }
        }
        columns.move(block, changes, scores);
        for (std::size_t row = 0; row < chosen.size(); ++row) EXPECT_NEAR(scores[row], moved[row], 1e-12);
        EXPECT(sum_losses(scores, targets, kBias, loss).loss <= most * (1 + 1e-12));
      }
      if (threads == 1) alone = scores;
      EXPECT(scores == alone);
    }
  }
}

TEST("features that occur are numbered in their order") {
  for (const std::size_t features : {1UL, 63UL, 64UL, 65UL, 1000UL}) {
    std::mt19937 random(static_cast<unsigned>(features));
    std::vector<std::uint32_t> indices(features / 3 + 1);
    for (auto& index : indices) index = static_cast<std::uint32_t>(random() % features);
    const Numbering numbering(indices, features);
    std::vector<std::uint32_t> occurring(numbering.size()), numbers(indices.size());
    numbering.write_features(occurring);
    numbering.renumber(indices, numbers);
    const std::set<std::uint32_t> expected(indices.begin(), indices.end());
    EXPECT(occurring == std::vector<std::uint32_t>(expected.begin(), expected.end()));
    for (std::size_t i = 0; i < indices.size(); ++i) EXPECT_EQ(occurring[numbers[i]], indices[i]);
  }
  EXPECT_EQ(Numbering({}, 0).size(), 0);
}

TEST("columns begin where they should, also those of no entry and of no rows") {
  const Sample sample(kFeatures, 6, 2);
  Team team(2);
  const Columns none(sample.view(), {}, kFeatures, team);
  EXPECT(std::vector<std::uint64_t>(none.offsets().begin(), none.offsets().end()) ==
         std::vector<std::uint64_t>(kFeatures + 1));
  const std::vector<std::uint64_t> chosen{1, 4};
  const Columns columns(sample.view(), chosen, kFeatures, team);
  const Dense dense(sample, chosen);
  for (std::size_t column = 0; column < kFeatures; ++column) {
    std::uint64_t entries = 0;
    for (std::size_t row = 0; row < chosen.size(); ++row) {
      for (std::uint64_t i = sample.offsets[chosen[row]]; i < sample.offsets[chosen[row] + 1]; ++i) {
        entries += sample.indices[i] == column;
      }
    }
    EXPECT_EQ(columns.offsets()[column + 1] - columns.offsets()[column], entries);
  }
}

}  // namespace
