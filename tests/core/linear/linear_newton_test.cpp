// Newton's method and the proximal dual method: the optimum's conditions in dense loops, threads, ranks and restarts.
#include "linear/newton.hpp"

#include <algorithm>
#include <barrier>
#include <cmath>
#include <stdexcept>
#include <thread>
#include <vector>

#include "linear_sample.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad::linear;

constexpr std::size_t kRows = 200;
constexpr double kL2 = 0.01;

struct Task {
  Sample sample;
  std::vector<std::uint64_t> chosen;
  std::vector<float> row_weights;
  std::size_t features;
  double total = 0;

  explicit Task(std::size_t count) : sample(count, kRows, 17, 20), features(count) {
    for (std::uint64_t row = 0; row < kRows; ++row) {
      if (row % 7 != 0) chosen.push_back(row);
      row_weights.push_back(static_cast<float>(row % 3) / 2 + 0.5F);
    }
    for (const std::uint64_t row : chosen) total += static_cast<double>(row_weights[row]);
  }

  Newton::Problem problem(Loss loss, double tolerance = 1e-8) const {
    return {.rows = sample.view(), .chosen = chosen, .targets = sample.targets, .row_weights = row_weights,
            .total_weight = total, .features = features, .loss = loss, .l2 = kL2, .with_bias = true,
            .tolerance = tolerance};
  }

  double objective(Loss loss, const std::vector<float>& weights, double bias) const {
    double sum = 0, square = 0;
    for (const std::uint64_t row : chosen) {
      double score = bias;
      for (std::uint64_t e = sample.offsets[row]; e < sample.offsets[row + 1]; ++e) {
        score += static_cast<double>(weights[sample.indices[e]]) * static_cast<double>(sample.values[e]);
      }
      sum += static_cast<double>(row_weights[row]) * loss_at(loss, score, static_cast<double>(sample.targets[row])).value;
    }
    for (const float one : weights) square += static_cast<double>(one) * static_cast<double>(one);
    return sum / total + kL2 / 2 * square;
  }
};

struct Found {
  std::vector<float> weights;
  double bias = 0;
  Newton::Step last;
  std::size_t steps = 0;
};

const Newton::Reduce kAlone = [](std::span<double>, std::size_t) {};

Found run(Newton& newton, std::size_t features, std::size_t most = 2000) {
  Found found;
  found.weights.resize(features);
  while (found.steps < most && !found.last.converged && !found.last.stuck) {
    found.last = newton.step();
    ++found.steps;
  }
  newton.write_weights(found.weights);
  found.bias = newton.bias();
  return found;
}

Found solve(const Newton::Problem& problem, std::size_t threads = 1) {
  Team team(threads);
  Newton newton(problem, team, kAlone);
  return run(newton, problem.features);
}

constexpr Loss kLosses[] = {Loss::logistic, Loss::hinge, Loss::squared_hinge, Loss::squared_error};

TEST("no model near the one found has a lower objective, with few features and with many") {
  for (const std::size_t features : {20UL, 400UL}) {
    const Task task(features);
    for (const Loss loss : kLosses) {
      const Found found = solve(task.problem(loss));
      EXPECT(found.last.converged || found.last.stuck);
      EXPECT(found.last.gap < 1e-4);
      const double best = task.objective(loss, found.weights, found.bias);
      EXPECT(std::abs(best - found.last.objective) < 1e-6 * best);
      for (const double change : {-1e-2, 1e-2}) {
        EXPECT(task.objective(loss, found.weights, found.bias + change) > best - 1e-7);
        for (std::size_t i = 0; i < features; i += 3) {
          std::vector<float> other = found.weights;
          other[i] += static_cast<float>(change);
          EXPECT(task.objective(loss, other, found.bias) > best - 1e-7);
        }
      }
    }
  }
}

TEST("the gap of the hinge is at least what a further training wins") {
  const Task task(400);
  const double best = solve(task.problem(Loss::hinge, 1e-7)).last.objective;
  for (const double tolerance : {0.3, 0.1, 1e-2, 1e-3}) {
    const Found found = solve(task.problem(Loss::hinge, tolerance));
    EXPECT(found.last.gap <= tolerance);
    EXPECT(found.last.objective * (1 - found.last.gap) <= best * (1 + 1e-6));
  }
}

TEST("threads change no bit") {
  for (const std::size_t features : {20UL, 400UL}) {
    const Task task(features);
    for (const Loss loss : kLosses) {
      const Found one = solve(task.problem(loss, 1e-4)), three = solve(task.problem(loss, 1e-4), 3);
      EXPECT(one.weights == three.weights);
      EXPECT(one.bias == three.bias);
      EXPECT(one.steps == three.steps);
    }
  }
}

TEST("ranks that each have a part of the rows find the same model") {
  const Task task(400);
  for (const Loss loss : kLosses) {
    const Found alone = solve(task.problem(loss));
    constexpr std::size_t kRanks = 3;
    std::vector<std::vector<double>> sent(kRanks);
    std::barrier together(kRanks);
    std::vector<Found> found(kRanks);
    std::vector<std::thread> ranks;
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&, rank] {
        Newton::Problem problem = task.problem(loss);
        const std::size_t first = task.chosen.size() * rank / kRanks, last = task.chosen.size() * (rank + 1) / kRanks;
        problem.chosen = problem.chosen.subspan(first, last - first);
        Team team(1);
        Newton newton(problem, team, [&](std::span<double> sums, std::size_t) {
          sent[rank].assign(sums.begin(), sums.end());
          together.arrive_and_wait();
          for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = sent[0][i] + sent[1][i] + sent[2][i];
          together.arrive_and_wait();
        });
        found[rank] = run(newton, task.features);
      });
    }
    for (std::thread& rank : ranks) rank.join();
    for (const Found& one : found) {
      EXPECT(one.weights == found[0].weights);
      EXPECT(one.bias == found[0].bias);
      EXPECT(std::abs(one.last.objective - alone.last.objective) < 1e-6 * alone.last.objective);
    }
  }
}

TEST("a training goes on from what it was settled to, to the bit") {
  const Task task(400);
  for (const Loss loss : kLosses) {
    Team team(1);
    Newton whole(task.problem(loss), team, kAlone);
    for (int step = 0; step < 4; ++step) whole.step();
    whole.settle();
    std::vector<float> weights(task.features);
    whole.write_weights(weights);
    Newton again(task.problem(loss), team, kAlone);
    again.restore(weights, whole.bias(), std::vector<double>(whole.duals().begin(), whole.duals().end()));
    const Found one = run(whole, task.features), other = run(again, task.features);
    EXPECT(one.weights == other.weights);
    EXPECT(one.bias == other.bias);
    EXPECT(one.steps == other.steps);
  }
}

TEST("an error while sums travel leaves the model as it was") {
  const Task task(400);
  Team team(1);
  int calls = 0;
  Newton newton(task.problem(Loss::logistic), team, [&](std::span<double>, std::size_t) {
    if (++calls == 12) throw std::runtime_error("lost");
  });
  std::vector<float> before(task.features), after(task.features);
  bool thrown = false;
  while (!thrown) {
    newton.write_weights(before);
    try {
      newton.step();
    } catch (const std::runtime_error&) {
      thrown = true;
    }
  }
  newton.write_weights(after);
  EXPECT(before == after);
  EXPECT(run(newton, task.features).last.converged);
}

TEST("no rows with entries, and no penalty") {
  const std::vector<std::uint64_t> offsets{0, 0, 0}, chosen{0, 1};
  const std::vector<float> targets{1, 1};
  for (const Loss loss : kLosses) {
    const Newton::Problem problem{.rows = {offsets, {}, {}}, .chosen = chosen, .targets = targets, .row_weights = {},
                                  .total_weight = 2, .features = 3, .loss = loss,
                                  .l2 = loss == Loss::hinge ? 1e-3 : 0, .with_bias = true,
                                  .tolerance = 1e-3};
    Team team(1);
    Newton newton(problem, team, kAlone);
    const Found found = run(newton, 3, 60);
    EXPECT(found.weights == std::vector<float>(3));
    EXPECT(std::isfinite(found.bias));
    EXPECT(found.last.objective < (loss == Loss::squared_error ? 1e-9 : 0.01));
  }
}

}  // namespace
