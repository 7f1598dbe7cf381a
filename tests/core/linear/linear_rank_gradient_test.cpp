// A rank's gradient, and steps, by weights in the places of a numbering, against those by weights in features' places.
#include "linear/rank_gradient.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "linear_sample.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad::linear;

constexpr std::size_t kOwn = 3000, kFeatures = 5000;  // rows have none of the last ones

struct Entries {
  std::vector<std::uint32_t> indices;
  std::vector<float> values;

  bool operator==(const Entries&) const = default;
};

Entries entries_of(RankGradient& gradient, const RowsView& rows, std::span<const float> targets,
                   std::span<const std::uint64_t> chosen) {
  const std::size_t count = gradient.find(rows, targets, chosen, Loss::logistic);
  Entries found{std::vector<std::uint32_t>(count), std::vector<float>(count)};
  gradient.take(found.indices, found.values);
  return found;
}

TEST("numbers of the features that occur, and behind them of all others") {
  const Sample sample(kOwn, 60, 2);
  const Numbering numbering(sample.indices, kFeatures);
  std::vector<std::uint32_t> order(numbering.size());
  numbering.write_features(order);
  EXPECT(std::is_sorted(order.begin(), order.end()));
  for (const std::uint32_t index : sample.indices) EXPECT(std::binary_search(order.begin(), order.end(), index));
  for (std::uint32_t index = 0; index < kFeatures; ++index) {
    if (std::find(sample.indices.begin(), sample.indices.end(), index) == sample.indices.end()) order.push_back(index);
  }
  EXPECT_EQ(order.size(), kFeatures);
  for (std::uint32_t place = 0; place < kFeatures; ++place) EXPECT_EQ(numbering.place_of(order[place]), place);
}

TEST("gradients and steps by places have the bits of those by features") {
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
        Descent by_features(kFeatures, rule, penalty, true, team);
        Descent by_places(kFeatures, rule, penalty, true, team, &numbering);
        RankGradient over_features(by_features, nullptr, team), over_places(by_places, &numbering, team);
        std::mt19937 random(5);
        const auto compare = [&] {
          // few rows read what weights owe as well; all rows have more entries than the rank has features
          for (const std::size_t rows : {3UL, 60UL}) {
            const std::span chosen = std::span(all_rows).first(rows);
            const Entries expected = entries_of(over_features, sample.view(), sample.targets, chosen);
            EXPECT(entries_of(over_places, numbered, sample.targets, chosen) == expected);
            EXPECT_EQ(expected.indices.back(), kFeatures + 1);
            EXPECT(std::is_sorted(expected.indices.begin(), expected.indices.end()));
          }
          std::vector<float> expected(kFeatures), found(kFeatures);
          by_features.write_weights(expected);
          by_places.write_weights(found);
          EXPECT(found == expected);
          EXPECT_EQ(by_places.bias(), by_features.bias());
          return std::count_if(found.begin(), found.end(), [](float weight) { return weight != 0; });
        };
        EXPECT_EQ(compare(), 0);
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
          by_features.step(indices, sums, 0.25, 0.5, 3);
          by_places.step(indices, sums, 0.25, 0.5, 3);
          const std::ptrdiff_t weights = compare();
          EXPECT(weights > 0 || penalty.l2 > 1);  // which shrinks them to nothing
        }
      }
    }
  }
}

TEST("a rank's gradient ends with the bias's and the loss") {
  const Sample sample(kOwn, 61, 6, 20);
  std::vector<std::uint64_t> chosen(31);
  std::iota(chosen.begin(), chosen.end(), 7);
  Team team(2);
  const Descent descent(kFeatures, Rule::sgd, {}, true, team);
  BatchGradient sums(kFeatures, team);
  RankGradient gradient(descent, nullptr, team);
  const auto [loss, slope] = sums.add(sample.view(), sample.targets, chosen, descent.view(), Loss::logistic);
  Entries expected;
  expected.indices.resize(sums.collect());
  expected.values.resize(expected.indices.size());
  sums.take(expected.indices, expected.values);
  expected.indices.insert(expected.indices.end(), {kFeatures, kFeatures + 1});
  expected.values.insert(expected.values.end(), {static_cast<float>(slope), static_cast<float>(loss)});
  EXPECT(entries_of(gradient, sample.view(), sample.targets, chosen) == expected);
}

TEST("scores of two rows have the bits of each one's") {
  const Sample sample(kOwn, 60, 8, 40);
  const ModelView model{sample.weights, 0.75, -0.5};
  for (std::size_t row = 0; row < 60; ++row) {
    for (std::size_t other = 0; other < 60; ++other) {
      const auto [one, two] = scores_of(sample.view(), row, other, model);
      EXPECT_EQ(one, score_of(sample.view(), row, model));
      EXPECT_EQ(two, score_of(sample.view(), other, model));
    }
  }
}

TEST("rows without entries") {
  const Numbering numbering({}, kFeatures);
  Team team(2);
  Descent descent(kFeatures, Rule::adagrad, {0.1, 0.1}, true, team, &numbering);
  const std::vector<std::uint32_t> indices{4, 70};
  const std::vector<float> sums{1, -1};
  descent.step(indices, sums, 2, 0.1, 1);
  RankGradient gradient(descent, &numbering, team);
  const Entries found = entries_of(gradient, {}, {}, {});
  EXPECT_EQ(found.indices.size(), RankGradient::kBehind);
  EXPECT_EQ(found.values.front(), 0.0F);
  std::vector<float> weights(kFeatures);
  descent.write_weights(weights);
  EXPECT(weights[4] < 0 && weights[70] > 0);
  EXPECT_EQ(std::count(weights.begin(), weights.end(), 0.0F), kFeatures - 2);
}

}  // namespace
