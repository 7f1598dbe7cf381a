// Newton's method and the proximal dual method: the optimum's conditions in dense loops, threads, ranks and restarts.
#include "linear/newton.hpp"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kernels/dispatch.hpp"
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
            .total_rows = chosen.size(), .features = features, .loss = loss, .l2 = kL2, .with_bias = true,
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

const Newton::Reduce kAlone = [](std::span<double>, std::size_t, Newton::Over) {};

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
  for (const std::size_t features : {20UL, 90UL, 400UL}) {
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

TEST("the gap is at least what a further training wins") {
  for (const std::size_t features : {90UL, 400UL}) {
    const Task task(features);
    for (const Loss loss : kLosses) {
      for (const double l2 : {1e-3, 1e-5}) {
        const auto asked = [&](double tolerance) {
          Newton::Problem problem = task.problem(loss, tolerance);
          problem.l2 = l2;
          return solve(problem).last;
        };
        const double best = asked(1e-7).objective;
        for (const double tolerance : {0.3, 0.1, 1e-2, 1e-3}) {
          const Newton::Step last = asked(tolerance);
          EXPECT(last.gap <= tolerance);
          EXPECT(last.objective * (1 - last.gap) <= best * (1 + 1e-6));
        }
      }
    }
  }
}

TEST("with an L1 penalty the least subgradient nearly vanishes, and threads change no bit") {
  for (const std::size_t features : {20UL, 90UL, 400UL}) {
    const Task task(features);
    for (const Loss loss : {Loss::logistic, Loss::squared_hinge, Loss::squared_error}) {
      Newton::Problem problem = task.problem(loss, 1e-6);
      problem.l1 = 0.01;
      const Found found = solve(problem), three = solve(problem, 3);
      EXPECT(found.last.converged);
      EXPECT(found.weights == three.weights && found.bias == three.bias);
      const auto zeros = std::count(found.weights.begin(), found.weights.end(), 0.0F);
      EXPECT(zeros > 0 && static_cast<std::size_t>(zeros) < features);
      const auto value = [&](const std::vector<float>& weights, double bias) {
        double sum = task.objective(loss, weights, bias);
        for (const float one : weights) sum += problem.l1 * std::abs(static_cast<double>(one));
        return sum;
      };
      const double best = value(found.weights, found.bias);
      EXPECT(std::abs(best - found.last.objective) < 1e-6 * best);
      for (const double change : {-1e-3, 1e-3}) {
        EXPECT(value(found.weights, found.bias + change) > best - 1e-8);
        for (std::size_t i = 0; i < features; ++i) {
          std::vector<float> other = found.weights;
          other[i] += static_cast<float>(change);
          EXPECT(value(other, found.bias) > best - 1e-8);
        }
      }
    }
  }
}

TEST("threads change no bit") {
  for (const std::size_t features : {20UL, 90UL, 400UL}) {
    const Task task(features);
    for (const Loss loss : kLosses) {
      const Found one = solve(task.problem(loss, 1e-4)), three = solve(task.problem(loss, 1e-4), 3);
      EXPECT(one.weights == three.weights);
      EXPECT(one.bias == three.bias);
      EXPECT(one.steps == three.steps);
    }
  }
}

TEST("neither an instruction set nor columns without entries, which make rows sparse, change a bit") {
  const Task dense(20);
  Task sparse = dense;
  sparse.features = 100;
  for (const Loss loss : kLosses) {
    const Found expected = solve(dense.problem(loss, 1e-4));
    for (const auto level : telegrad::kernels::kSimdLevels) {
      if (level > telegrad::kernels::best_simd_level()) continue;
      const telegrad::kernels::ScopedSimdLevel scope(level);
      for (const Task* task : {&dense, static_cast<const Task*>(&sparse)}) {
        Found found = solve(task->problem(loss, 1e-4));
        found.weights.resize(dense.features);
        EXPECT(found.weights == expected.weights);
        EXPECT(found.bias == expected.bias);
        EXPECT(found.steps == expected.steps);
      }
    }
  }
}

// As std::barrier, whose waiting threads take the processor from those that others wait for.
class Barrier {
 public:
  explicit Barrier(std::size_t count) : count_(count) {}

  void wait() {
    std::unique_lock lock(mutex_);
    const std::size_t round = round_;
    if (++waiting_ == count_) {
      waiting_ = 0;
      ++round_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  std::size_t count_, waiting_ = 0, round_ = 0;
  std::mutex mutex_;
  std::condition_variable all_;
};

// What each rank finds whose rows are those chosen between two borders.
std::vector<Found> among(const Newton::Problem& whole, const std::vector<std::size_t>& borders) {
  const std::size_t ranks = borders.size() - 1;
  std::vector<std::vector<double>> sent(ranks);
  Barrier together(ranks);
  std::vector<Found> found(ranks);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Newton::Problem problem = whole;
      problem.chosen = problem.chosen.subspan(borders[rank], borders[rank + 1] - borders[rank]);
      Team team(rank % 2 + 1);
      Newton newton(problem, team, [&](std::span<double> numbers, std::size_t, Newton::Over over) {
        sent[rank].assign(numbers.begin(), numbers.end());
        together.wait();
        for (std::size_t i = 0; i < numbers.size(); ++i) {
          numbers[i] = 0;
          for (const auto& one : sent) {
            numbers[i] = over == Newton::Over::sum ? numbers[i] + one[i] : std::max(numbers[i], one[i]);
          }
        }
        together.wait();
      });
      found[rank] = run(newton, problem.features * problem.classes);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return found;
}

// As among(), where each rank has the features of its own rows alone. Weights are of all features.
std::vector<Found> among_split(const Newton::Problem& whole, const std::vector<std::size_t>& borders) {
  const std::size_t ranks = borders.size() - 1, classes = whole.classes;
  std::vector<std::vector<double>> sent(ranks);
  std::vector<std::vector<std::size_t>> own(ranks);
  std::vector<std::vector<std::uint8_t>> counted(ranks);
  std::vector<std::vector<std::uint32_t>> indices(ranks);
  std::vector<bool> seen(whole.features);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    std::vector<std::size_t> places(whole.features, whole.features);
    for (std::size_t i = borders[rank]; i < borders[rank + 1]; ++i) {
      const std::uint64_t row = whole.chosen[i];
      for (std::uint64_t e = whole.rows.offsets[row]; e < whole.rows.offsets[row + 1]; ++e) places[whole.rows.indices[e]] = 0;
    }
    for (std::size_t feature = 0; feature < whole.features; ++feature) {
      if (places[feature] == whole.features) continue;
      places[feature] = own[rank].size();
      own[rank].push_back(feature);
      counted[rank].push_back(!seen[feature]);
      seen[feature] = true;
    }
    for (const std::uint32_t index : whole.rows.indices) indices[rank].push_back(static_cast<std::uint32_t>(places[index]));
  }
  Barrier together(ranks);
  std::vector<Found> found(ranks);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Newton::Problem problem = whole;
      problem.chosen = problem.chosen.subspan(borders[rank], borders[rank + 1] - borders[rank]);
      problem.rows.indices = indices[rank];
      problem.features = own[rank].size();
      problem.split = true;
      problem.counted = counted[rank];
      problem.rank = rank;
      problem.ranks = ranks;
      Team team(rank % 2 + 1);
      Newton newton(problem, team, [&](std::span<double> numbers, std::size_t of_feature, Newton::Over over) {
        const std::size_t shared = own[rank].size() * of_feature;
        const auto place = [&](std::size_t i) {
          if (i >= shared) return whole.features * of_feature + i - shared;
          return own[rank][i / of_feature] * of_feature + i % of_feature;
        };
        sent[rank].assign(whole.features * of_feature + numbers.size() - shared, 0);
        for (std::size_t i = 0; i < numbers.size(); ++i) sent[rank][place(i)] = numbers[i];
        together.wait();
        for (std::size_t i = 0; i < numbers.size(); ++i) {
          numbers[i] = 0;
          for (const auto& one : sent) {
            const double other = one[place(i)];
            numbers[i] = over == Newton::Over::sum ? numbers[i] + other : std::max(numbers[i], other);
          }
        }
        together.wait();
      });
      const Found here = run(newton, problem.features * classes);
      found[rank] = here;
      found[rank].weights.assign(whole.features * classes, 0);
      for (std::size_t i = 0; i < here.weights.size(); ++i) {
        found[rank].weights[own[rank][i / classes] * classes + i % classes] = here.weights[i];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  // where a rank lacks a feature, others have it
  for (std::size_t i = 0; i < whole.features * classes; ++i) {
    float one = 0;
    for (const Found& each : found) one = each.weights[i] == 0 ? one : each.weights[i];
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      if (!std::binary_search(own[rank].begin(), own[rank].end(), i / classes)) found[rank].weights[i] = one;
    }
  }
  return found;
}

TEST("vectors that are split over the ranks give the same bits as whole ones") {
  for (const float scale : {1.0F, 1e5F}) {
    Task task(400);
    for (std::size_t e = 0; e < task.sample.values.size(); ++e) {
      if (task.sample.indices[e] % 3 == 0) task.sample.values[e] *= scale;
    }
    for (std::size_t row = 0; row < kRows; ++row) task.sample.targets[row] = row % 5 < 2 ? 1.0F : -1.0F;
    const std::size_t count = task.chosen.size();
    for (const auto& borders : {std::vector<std::size_t>{0, 5, count}, {0, 40, 40, 43, count}}) {
      for (const Loss loss : kLosses) {
        Newton::Problem problem = task.problem(loss, scale > 1 ? 1e-2 : 1e-4);
        problem.total_features = task.features;
        const Found alone = solve(problem);
        for (const Found& one : among_split(problem, borders)) {
          EXPECT(one.weights == alone.weights);
          EXPECT(one.bias == alone.bias);
          EXPECT(one.steps == alone.steps);
          EXPECT(one.last.objective == alone.last.objective);
        }
      }
      Newton::Problem problem = task.problem(Loss::logistic, 1e-2);
      problem.total_features = task.features;
      std::vector<float> targets(kRows);
      for (std::size_t row = 0; row < kRows; ++row) targets[row] = static_cast<float>(row % 3);
      problem.targets = targets;
      problem.classes = 3;
      Team team(1);
      Newton newton(problem, team, kAlone);
      const Found alone = run(newton, 3 * problem.features);
      for (const Found& one : among_split(problem, borders)) EXPECT(one.weights == alone.weights);
    }
  }
}

TEST("any number of ranks finds the same bits") {
  for (const float scale : {1.0F, 1e5F}) {
    for (const std::size_t features : {20UL, 90UL, 400UL}) {
      Task task(features);
      for (std::size_t e = 0; e < task.sample.values.size(); ++e) {
        if (task.sample.indices[e] % 3 == 0) task.sample.values[e] *= scale;
      }
      for (const Loss loss : kLosses) {
        const Found alone = solve(task.problem(loss, 1e-2));
        const std::size_t count = task.chosen.size();
        for (const auto& borders : {std::vector<std::size_t>{0, 5, count}, {0, 40, 40, 99, count}}) {
          for (const Found& one : among(task.problem(loss, 1e-2), borders)) {
            EXPECT(one.weights == alone.weights);
            EXPECT(one.bias == alone.bias);
            EXPECT(one.steps == alone.steps);
            EXPECT(one.last.objective == alone.last.objective);
          }
        }
      }
    }
  }
}

TEST("the softmax's gradient is 0 at the model found, with the same bits on any number of ranks") {
  Task task(30);
  constexpr std::size_t kClasses = 4;
  for (std::size_t row = 0; row < kRows; ++row) task.sample.targets[row] = static_cast<float>(row * row % 11 % kClasses);
  Newton::Problem problem = task.problem(Loss::logistic, 1e-10);
  problem.classes = kClasses;
  Team team(1);
  Newton newton(problem, team, kAlone);
  const Found found = run(newton, task.features * kClasses);
  EXPECT(found.last.converged);
  std::vector<double> biases(kClasses), gradient(task.features * kClasses), of_biases(kClasses);
  newton.write_biases(biases);
  double value = 0;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const auto weight = static_cast<double>(found.weights[i]);
    gradient[i] = kL2 * weight;
    value += kL2 / 2 * weight * weight;
  }
  for (const std::uint64_t row : task.chosen) {
    std::vector<double> scores = biases;
    const auto entries = [&](const auto& act) {
      for (std::uint64_t e = task.sample.offsets[row]; e < task.sample.offsets[row + 1]; ++e) {
        for (std::size_t k = 0; k < kClasses; ++k) {
          act(task.sample.indices[e] * kClasses + k, k, static_cast<double>(task.sample.values[e]));
        }
      }
    };
    entries([&](std::size_t i, std::size_t k, double entry) { scores[k] += static_cast<double>(found.weights[i]) * entry; });
    double sum = 0;
    for (const double score : scores) sum += std::exp(score);
    const auto own = static_cast<std::size_t>(task.sample.targets[row]);
    const double weight = static_cast<double>(task.row_weights[row]) / task.total;
    value += weight * (std::log(sum) - scores[own]);
    for (std::size_t k = 0; k < kClasses; ++k) {
      scores[k] = weight * (std::exp(scores[k]) / sum - (k == own ? 1 : 0));
      of_biases[k] += scores[k];
    }
    entries([&](std::size_t i, std::size_t k, double entry) { gradient[i] += scores[k] * entry; });
  }
  EXPECT(std::abs(value - found.last.objective) < 1e-6 * value);
  for (const double one : gradient) EXPECT(std::abs(one) < 2e-5);
  for (const double one : of_biases) EXPECT(std::abs(one) < 2e-5);
  for (const Found& one : among(problem, {0, 30, 100, task.chosen.size()})) EXPECT(one.weights == found.weights);
}

TEST("a training goes on from what it was settled to, to the bit") {
  for (const std::size_t features : {400, 40}) {  // the latter's Hessians are factorised, and those of the squared hinge kept
    const Task task(features);
    for (const Loss loss : kLosses) {
      for (const bool ends : {false, true}) {
        Team team(1);
        Newton whole(task.problem(loss), team, kAlone);
        for (int step = 0; step < 4; ++step) whole.step();
        whole.settle(ends);
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
  }
}

TEST("a training that is settled after each step converges as one that is not") {
  const Task task(400);
  for (const Loss loss : kLosses) {
    for (const double l2 : {kL2, 1e-4, 1e-6}) {
      Newton::Problem problem = task.problem(loss, 1e-5);
      problem.l2 = l2;
      const Found plain = solve(problem);
      Team team(1);
      Newton newton(problem, team, kAlone);
      Newton::Step last;
      std::size_t steps = 0;
      for (; steps < 2 * plain.steps && !last.converged && !last.stuck; ++steps) {
        if (steps > 0) newton.settle(false);
        last = newton.step();
      }
      EXPECT(last.converged || last.stuck);
      EXPECT(std::abs(last.objective - plain.last.objective) < 1e-4 * plain.last.objective);
    }
  }
}

TEST("a descent by coordinates proves its gap, hands over where it is slow, and goes on to the bit") {
  const Task task(400);
  for (const auto& [loss, with_bias] : {std::pair(Loss::hinge, true), {Loss::hinge, false}, {Loss::squared_hinge, true},
                                        {Loss::squared_hinge, false}}) {
    Newton::Problem problem = task.problem(loss, 1e-9);
    problem.with_bias = with_bias;
    const Found best = solve(problem);
    problem.descends = true;
    for (const double l2 : {kL2, 1e-7}) {  // with the smaller one it is slow
      problem.l2 = l2;
      problem.tolerance = l2 == kL2 ? 1e-9 : 1e-5;
      Team team(1);
      Newton whole(problem, team, kAlone);
      for (int step = 0; step < 2; ++step) {
        const Newton::Step found = whole.step();
        if (l2 < kL2) continue;
        EXPECT(found.objective * (1 - found.gap) <= best.last.objective * (1 + 1e-9));
        EXPECT(found.objective >= best.last.objective * (1 - 1e-9));
      }
      whole.settle(false);
      for (const double one : whole.duals().first(task.chosen.size())) EXPECT(one >= 0 && (one <= 1 || loss != Loss::hinge));
      std::vector<float> weights(task.features);
      whole.write_weights(weights);
      Newton again(problem, team, kAlone);
      again.restore(weights, whole.bias(), std::vector<double>(whole.duals().begin(), whole.duals().end()));
      const Found one = run(whole, task.features), other = run(again, task.features);
      EXPECT(one.last.converged || one.last.stuck);
      EXPECT(one.weights == other.weights);
      EXPECT(one.bias == other.bias);
      EXPECT(one.steps == other.steps);
      if (l2 == kL2) EXPECT(std::abs(one.last.objective - best.last.objective) < 1e-7 * best.last.objective);
    }
  }
}

TEST("an error while sums travel leaves the model as it was") {
  const Task task(400);
  Team team(1);
  int calls = 0;
  Newton newton(task.problem(Loss::logistic), team, [&](std::span<double>, std::size_t, Newton::Over) {
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
                                  .total_rows = 2, .features = 3, .loss = loss,
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
