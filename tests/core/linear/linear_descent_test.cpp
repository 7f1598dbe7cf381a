// Steps that touch few weights, against steps in f64 that treat every weight every time.
#include "linear/descent.hpp"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "linear_sample.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad::linear;

struct Steps {
  std::vector<std::vector<std::uint32_t>> indices;
  std::vector<std::vector<float>> sums;
  std::vector<double> slopes, rates;
};

constexpr std::size_t kFeatures = 40;
constexpr double kRows = 3;

Steps steps_of(unsigned seed, std::size_t count, double rate) {
  std::mt19937 random(seed);
  const auto number = [&] { return static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 500; };
  Steps steps;
  for (std::size_t step = 0; step < count; ++step) {
    std::vector<std::uint32_t> indices;
    for (std::uint32_t i = 0; i < kFeatures; ++i) {
      if (random() % (i + 1) == 0) indices.push_back(i);  // the last ones are rare
    }
    std::vector<float> sums(indices.size());
    for (float& sum : sums) sum = random() % 8 == 0 ? 0 : number();
    steps.indices.push_back(indices);
    steps.sums.push_back(sums);
    steps.slopes.push_back(static_cast<double>(number()));
    steps.rates.push_back(rate / (1 + 0.01 * static_cast<double>(step)));
  }
  return steps;
}

double soft(double x, double by) { return std::copysign(std::max(std::abs(x) - by, 0.0), x); }

// What the head of descent.hpp says, weight by weight.
std::vector<double> densely(const Steps& steps, Rule rule, Penalty penalty) {
  std::vector<double> weights(kFeatures), squares(kFeatures);
  for (std::size_t step = 0; step < steps.rates.size(); ++step) {
    std::vector<double> gradient(kFeatures);
    for (std::size_t i = 0; i < steps.indices[step].size(); ++i) {
      gradient[steps.indices[step][i]] = static_cast<double>(steps.sums[step][i]) / kRows;
    }
    const double rate = steps.rates[step];
    for (std::size_t i = 0; i < kFeatures; ++i) {
      if (rule == Rule::sgd) {
        weights[i] = soft(weights[i] - rate * gradient[i], rate * penalty.l1) / (1 + rate * penalty.l2);
        continue;
      }
      squares[i] += gradient[i] * gradient[i];
      if (squares[i] == 0) continue;
      const double time = rate / std::sqrt(squares[i]), moved = weights[i] - time * gradient[i];
      // the flow in thousands of small prox steps, which meet it as they grow more
      constexpr int kParts = 4096;
      double flown = moved;
      for (int part = 0; part < kParts; ++part) {
        flown = soft(flown, time / kParts * penalty.l1) / (1 + time / kParts * penalty.l2);
      }
      weights[i] = flown;
    }
  }
  return weights;
}

TEST("weights that are seldom touched get what every step would have done to them") {
  for (const Rule rule : {Rule::sgd, Rule::adagrad}) {
    for (const Penalty penalty : {Penalty{}, Penalty{0, 0.3}, Penalty{0.05, 0}, Penalty{0.02, 0.2}, Penalty{1e-3, 9}}) {
      const Steps steps = steps_of(7, 60, rule == Rule::sgd ? 0.5 : 0.2);
      const std::vector<double> expected = densely(steps, rule, penalty);
      std::vector<float> alone(kFeatures);
      for (const std::size_t threads : {1UL, 3UL}) {
        for (const bool dense : {false, true}) {
          Team team(threads);
          Descent descent(kFeatures, rule, penalty, true, team);
          double bias = 0, bias_squares = 0;
          for (std::size_t step = 0; step < steps.rates.size(); ++step) {
            if (dense) {
              std::vector<float> sums(kFeatures);
              for (std::size_t i = 0; i < steps.indices[step].size(); ++i) {
                sums[steps.indices[step][i]] = steps.sums[step][i];
              }
              descent.step({}, sums, steps.slopes[step], steps.rates[step], kRows);
            } else {
              descent.step(steps.indices[step], steps.sums[step], steps.slopes[step], steps.rates[step], kRows);
            }
            const double slope = steps.slopes[step] / kRows;
            bias_squares += slope * slope;
            bias -= steps.rates[step] * slope / (rule == Rule::sgd ? 1 : std::sqrt(bias_squares));
          }
          std::vector<float> weights(kFeatures);
          descent.write_weights(weights);
          for (std::size_t i = 0; i < kFeatures; ++i) {
            EXPECT_NEAR(static_cast<double>(weights[i]), expected[i], 2e-5 * (1 + std::abs(expected[i])));
          }
          EXPECT_NEAR(descent.bias(), bias, 1e-9);
          if (threads == 1 && !dense) alone = weights;
          EXPECT(weights == alone);

          // scores are of weights that have paid what they owe
          std::vector<std::uint32_t> all(kFeatures);
          for (std::uint32_t i = 0; i < kFeatures; ++i) all[i] = i;
          const std::vector<float> ones(kFeatures, 1);
          const std::vector<std::uint64_t> offsets{0, kFeatures};
          double sum = bias;
          for (const float weight : weights) sum += static_cast<double>(weight);
          EXPECT_NEAR(score_of({offsets, all, ones}, 0, descent.view()), sum, 1e-5);
        }
      }
    }
  }
}

TEST("a batch's gradient steps as the same sums do, without a bias where none is wanted") {
  const Sample sample(5000, 60, 5, 30);
  std::vector<std::uint64_t> chosen;
  for (std::uint64_t row = 0; row < 60; row += 2) chosen.push_back(row);
  for (const Rule rule : {Rule::sgd, Rule::adagrad}) {
    for (const double l1 : {0.0, 0.01}) {
      Team team(2);
      BatchGradient gradient(5000, team);
      Descent by_sums(5000, rule, {l1, 0.1}, false, team), by_gradient(5000, rule, {l1, 0.1}, false, team);
      for (int step = 0; step < 4; ++step) {
        const auto totals = gradient.add(sample.view(), sample.targets, chosen, by_sums.view(), Loss::squared_hinge);
        std::vector<std::uint32_t> indices(gradient.collect());
        std::vector<float> sums(indices.size());
        gradient.take(indices, sums);
        by_sums.step(indices, sums, totals.slope, 0.3, 30);
        const auto again = gradient.add(sample.view(), sample.targets, chosen, by_gradient.view(), Loss::squared_hinge);
        EXPECT_EQ(again.loss, totals.loss);
        EXPECT(by_gradient.step(gradient, again.slope, 0.3, 30) >= indices.size());
      }
      std::vector<float> one(5000), other(5000);
      by_sums.write_weights(one);
      by_gradient.write_weights(other);
      EXPECT(one == other);
      EXPECT_EQ(by_sums.bias(), 0.0);
    }
  }
}

TEST("a rank alone steps by its rows, with the same bits however many threads it has") {
  const Sample sample(30'000, 200, 6, 100);
  std::vector<std::uint64_t> chosen;
  for (std::uint64_t row = 0; row < 200; row += 3) chosen.push_back(row);
  const auto count = static_cast<double>(chosen.size());
  for (const Rule rule : {Rule::sgd, Rule::adagrad}) {
    for (const double l1 : {0.0, 0.001}) {
      std::vector<float> alone(30'000);
      for (const std::size_t threads : {1UL, 2UL, 5UL}) {
        Team team(threads);
        BatchGradient gradient(30'000, team), own(30'000, team);
        Descent expected(30'000, rule, {l1, 0.1}, true, team), descent(30'000, rule, {l1, 0.1}, true, team);
        for (int step = 0; step < 4; ++step) {
          const auto totals = gradient.add(sample.view(), sample.targets, chosen, expected.view(), Loss::hinge);
          expected.step(gradient, totals.slope, 0.3, count);
          const auto done = descent.step_alone(own, sample.view(), sample.targets, chosen, Loss::hinge, 0.3);
          EXPECT_NEAR(done.loss, totals.loss, 1e-3);
          EXPECT(done.entries > 0);
        }
        std::vector<float> one(30'000), other(30'000);
        expected.write_weights(one);
        descent.write_weights(other);
        for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], other[i], 1e-5);
        EXPECT_NEAR(descent.bias(), expected.bias(), 1e-6);
        if (threads == 1) alone = other;
        EXPECT(other == alone);
      }
    }
  }
}

TEST("what is restored goes on as what was settled, to the bit, with and without a numbering") {
  const Steps before = steps_of(3, 25, 0.3), behind = steps_of(4, 25, 0.3);
  const std::vector<std::uint32_t> own{2, 3, 17, 30};
  const Numbering numbering(own, kFeatures);
  Team team(2);
  for (const Rule rule : {Rule::sgd, Rule::adagrad}) {
    for (const Penalty penalty : {Penalty{}, Penalty{0, 0.3}, Penalty{0.05, 0}, Penalty{0.02, 0.2}}) {
      const auto go = [](Descent& descent, const Steps& steps) {
        for (std::size_t step = 0; step < steps.rates.size(); ++step) {
          descent.step(steps.indices[step], steps.sums[step], steps.slopes[step], steps.rates[step], kRows);
        }
      };
      const auto weights_of = [](const Descent& descent) {
        std::vector<float> weights(kFeatures);
        descent.write_weights(weights);
        return weights;
      };
      Descent first(kFeatures, rule, penalty, true, team);
      go(first, before);
      const std::vector<float> owing = weights_of(first);
      first.settle();
      const std::vector<float> settled = weights_of(first);
      EXPECT(settled == owing);
      std::vector<float> squares(rule == Rule::adagrad ? kFeatures : 0);
      first.write_squares(squares);
      Descent second(kFeatures, rule, penalty, true, team, &numbering);
      second.restore(settled, squares, first.bias(), first.bias_squares());
      EXPECT(weights_of(second) == settled);
      go(first, behind);
      go(second, behind);
      EXPECT(weights_of(second) == weights_of(first));
      EXPECT(weights_of(second) != settled);
      EXPECT_EQ(second.bias(), first.bias());
      EXPECT_EQ(second.bias_squares(), first.bias_squares());
    }
  }
}

TEST("a flow can be cut anywhere, ends at 0, and keeps what is no number") {
  for (const double l1 : {0.0, 0.3}) {
    for (const double l2 : {0.0, 1e-9, 0.7}) {
      for (const double weight : {-2.0, 0.0, 0.4}) {
        EXPECT_NEAR(flow(flow(weight, 0.3, l1, l2), 0.6, l1, l2), flow(weight, 0.9, l1, l2), 1e-12);
      }
    }
  }
  EXPECT_EQ(flow(0.5, 100, 0.1, 0), 0.0);
  EXPECT_EQ(flow(-0.5, 100, 0.1, 0.1), 0.0);
  EXPECT(std::isnan(flow(std::numeric_limits<double>::quiet_NaN(), 1, 0.1, 0.1)));
}

}  // namespace
