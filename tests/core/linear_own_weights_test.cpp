// Copies of the weights whose features some rows have, against the weights of all features.
#include "linear/own_weights.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "linear_sample.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad::linear;

constexpr std::size_t kOwn = 3000, kFeatures = 5000;  // rows have none of the last ones

TEST("numbers of the features that occur") {
  const Sample sample(kOwn, 60, 2);
  const Numbering numbering(sample.indices, kFeatures);
  std::vector<std::uint32_t> features(numbering.size());
  numbering.write_features(features);
  EXPECT(std::is_sorted(features.begin(), features.end()));
  for (std::uint32_t index = 0; index < kFeatures; ++index) {
    const auto found = std::lower_bound(features.begin(), features.end(), index);
    const bool occurs = std::find(sample.indices.begin(), sample.indices.end(), index) != sample.indices.end();
    EXPECT_EQ(numbering.contains(index), occurs);
    EXPECT_EQ(found != features.end() && *found == index, occurs);
    if (occurs) EXPECT_EQ(numbering.place_of(index), static_cast<std::uint32_t>(found - features.begin()));
  }
}

TEST("scores by copies have the bits of scores by all weights after any steps") {
  const Sample sample(kOwn, 60, 4, 20);
  const Numbering numbering(sample.indices, kFeatures);
  std::vector<std::uint32_t> places(sample.indices.size());
  numbering.renumber(sample.indices, places);
  const RowsView numbered{sample.offsets, places, sample.values};
  std::vector<std::uint64_t> all_rows(60);
  std::iota(all_rows.begin(), all_rows.end(), 0);
  for (const Rule rule : {Rule::sgd, Rule::adagrad}) {
    for (const Penalty penalty : {Penalty{}, Penalty{0, 0.3}, Penalty{0.01, 0}, Penalty{1e-3, 9}, Penalty{0, 1e6}}) {
      for (const std::size_t threads : {1UL, 3UL}) {
        Team team(threads);
        Descent descent(kFeatures, rule, penalty, true, team);
        OwnWeights own(descent, numbering, team);
        std::mt19937 random(5);
        const auto compare = [&] {
          // few rows read what weights owe as well, all rows have more entries than features
          const ModelView few = own.view(numbered, std::span(all_rows).first(3));
          EXPECT_EQ(few.owed != nullptr, descent.owes());
          std::size_t unequal = 0;
          double size = 0;
          for (std::size_t row = 0; row < 60; ++row) {
            unequal += score_of(numbered, row, few) != score_of(sample.view(), row, descent.view());
          }
          const ModelView many = own.view(numbered, all_rows);
          EXPECT(many.owed == nullptr);
          for (std::size_t row = 0; row < 60; ++row) {
            const double score = score_of(sample.view(), row, descent.view());
            unequal += score_of(numbered, row, many) != score;
            size += std::abs(score);
          }
          EXPECT_EQ(unequal, 0);
          return size;
        };
        EXPECT_EQ(compare(), 0.0);
        for (int step = 0; step < 24; ++step) {
          // few or many of all features, or all
          std::vector<std::uint32_t> indices;
          const std::size_t one_of = step % 3 == 0 ? 2 : 40;
          for (std::uint32_t i = 0; i < kFeatures; ++i) {
            if (random() % one_of == 0) indices.push_back(i);
          }
          if (step % 8 == 5) indices.clear();
          std::vector<float> sums(indices.empty() ? kFeatures : indices.size());
          for (float& sum : sums) sum = random() % 8 == 0 ? 0 : static_cast<float>(random() % 2001) / 500 - 2;
          descent.step(indices, sums, 0.25, 0.5, 3);
          own.follow(indices);
          EXPECT(compare() > 0);
        }
        EXPECT_EQ(descent.rewrites() > 0, rule == Rule::sgd && penalty.l2 > 0.3);
        EXPECT_EQ(descent.owes(), penalty.l1 > 0 || (rule == Rule::adagrad && penalty.l2 > 0));
      }
    }
  }
}

TEST("gradients over places are those over features") {
  const Sample sample(kOwn, 60, 6, 20);
  const Numbering numbering(sample.indices, kFeatures);
  std::vector<std::uint32_t> places(sample.indices.size());
  numbering.renumber(sample.indices, places);
  std::vector<std::uint64_t> chosen(30);
  std::iota(chosen.begin(), chosen.end(), 7);
  Team team(2);
  const Descent descent(kFeatures, Rule::sgd, {}, true, team);
  OwnWeights own(descent, numbering, team);
  BatchGradient over_features(kFeatures, team), over_places(numbering.size(), team);
  over_features.add(sample.view(), sample.targets, chosen, descent.view(), Loss::logistic);
  const RowsView numbered{sample.offsets, places, sample.values};
  over_places.add(numbered, sample.targets, chosen, own.view(numbered, chosen), Loss::logistic);
  std::vector<std::uint32_t> expected(over_features.collect()), found(over_places.collect());
  std::vector<float> expected_sums(expected.size()), found_sums(found.size());
  over_features.take(expected, expected_sums);
  over_places.take(found, found_sums);
  own.to_features(found);
  EXPECT(found == expected);
  EXPECT(found_sums == expected_sums);
}

TEST("rows without entries") {
  const Numbering numbering({}, kFeatures);
  Team team(2);
  Descent descent(kFeatures, Rule::adagrad, {0.1, 0.1}, true, team);
  OwnWeights own(descent, numbering, team);
  const std::vector<std::uint32_t> indices{4, 70};
  const std::vector<float> sums{1, -1};
  descent.step(indices, sums, 2, 0.1, 1);
  own.follow(indices);
  EXPECT_EQ(own.view({}, {}).weights.size(), 0);
  EXPECT_EQ(own.view({}, {}).bias, descent.bias());
}

}  // namespace
