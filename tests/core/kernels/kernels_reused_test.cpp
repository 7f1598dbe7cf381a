#include "kernels/reused.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernel_samples.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using kernels::Reused;
using kernels::ReuseRule;
using samples::Guarded;

using Floats = std::vector<float>;

constexpr float kNoLimit = std::numeric_limits<float>::quiet_NaN();

enum class Momentum : std::uint8_t { none, classic, nesterov };

struct Case {
  Floats residual, gradient, velocity;
  ReuseRule rule;
  Momentum momentum = Momentum::none;
  bool copies = false;  // into other memory than what is read
  float limit = kNoLimit;
};

struct Outcome {
  bool is_sound, is_exact;
  std::size_t count;
  std::uint32_t threshold, largest, added;
  std::vector<std::uint32_t> indices, values, residual, velocity;

  friend bool operator==(const Outcome&, const Outcome&) = default;
};

template <class Select>
Outcome run(Select select, const Case& given) {
  const std::size_t size = given.residual.size(), most = std::min(2 * given.rule.k, size);
  const bool moves = given.momentum != Momentum::none;
  Guarded<float> residual(given.residual, 4), velocity(given.velocity, 4), values(most);
  Guarded<std::uint32_t> indices(most);
  Floats fresh(size, 7.0F), fresh_velocity(size, 7.0F);
  const std::span<float> sums = given.copies ? std::span(fresh) : residual.span();
  const std::span<float> moved = !moves ? std::span<float>() : given.copies ? std::span(fresh_velocity) : velocity.span();
  const std::span<const float> none;
  const kernels::VelocityStep step{.velocity = moved,
                                   .before = moves && given.copies ? std::span<const float>(velocity.span()) : none,
                                   .factor = 0.9F,
                                   .nesterov = given.momentum == Momentum::nesterov,
                                   .masks = moves && given.rule.k % 2 == 0};
  const Reused found = select(sums, given.copies ? std::span<const float>(residual.span()) : none,
                              std::span<const float>(given.gradient), step, given.rule, 3U,
                              kernels::EntriesOut<float>{indices.span(), values.span()}, given.limit);
  EXPECT(residual.intact() && velocity.intact() && values.intact() && indices.intact());
  if (given.copies) {
    EXPECT(samples::bits(residual.copy()) == samples::bits(given.residual));
    EXPECT(samples::bits(velocity.copy()) == samples::bits(given.velocity));
  }
  if (!found.is_sound) return {.is_sound = false, .is_exact = false, .count = 0, .threshold = 0, .largest = 0, .added = 0,
                               .indices = {}, .values = {}, .residual = {}, .velocity = {}};
  const Floats kept_sums(sums.begin(), sums.end()), kept_velocity(moved.begin(), moved.end());
  auto kept_indices = indices.copy();
  auto kept_values = values.copy();
  kept_indices.resize(found.count);
  kept_values.resize(found.count);
  for (const float left : kept_sums) EXPECT(!(std::abs(left) > found.largest));
  const bool looked = moves || std::isfinite(given.limit);
  return {found.is_sound,
          found.is_exact,
          found.count,
          std::bit_cast<std::uint32_t>(found.threshold),
          std::bit_cast<std::uint32_t>(found.largest),
          looked ? std::bit_cast<std::uint32_t>(found.added) : 0,
          kept_indices,
          samples::bits(kept_values),
          samples::bits(kept_sums),
          samples::bits(kept_velocity)};
}

Outcome expect_reference(const Case& given) {
  const auto reference = [](auto... arguments) { return kernels::reference::accumulate_reused(arguments...); };
  const Outcome expected = run(reference, given);
  samples::at_every_level([&] {
    EXPECT(run([](auto... arguments) { return kernels::accumulate_reused(arguments...); }, given) == expected);
  });
  return expected;
}

Case normal_case(std::size_t size, std::size_t k, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Case given{.residual = Floats(size), .gradient = Floats(size), .velocity = Floats(size), .rule = {.k = k, .least = (k + 1) / 2}};
  for (float& value : given.residual) value = normal(random);
  for (float& value : given.gradient) value = normal(random);
  for (float& value : given.velocity) value = normal(random);
  return given;
}

// The magnitude that about `wanted` of the sums of a case without momentum reach.
float reached_by(const Case& given, std::size_t wanted) {
  Floats sums(given.residual.size());
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = std::abs(given.residual[i] + given.gradient[i]);
  std::sort(sums.begin(), sums.end(), std::greater<>());
  return sums[std::min(wanted, sums.size()) - 1];
}

TEST("a reused threshold gives the results of the reference, whatever number of entries reaches it") {
  for (const std::size_t size : {std::size_t{1}, std::size_t{31}, std::size_t{1000}, std::size_t{4096}, std::size_t{40'003}}) {
    for (const std::size_t k : {std::size_t{1}, (size + 99) / 100, (size + 3) / 4, size}) {
      Case given = normal_case(size, k, 1);
      bool reused = false, exact = false;
      for (const std::size_t reach : {std::size_t{1}, (k + 1) / 2, k, 2 * k, 2 * k + 1, 3 * k, 5 * k, size}) {
        given.rule.threshold = reached_by(given, reach);
        for (const bool is_due : {false, true}) {
          given.rule.is_due = is_due;
          for (const Momentum momentum : {Momentum::none, Momentum::classic, Momentum::nesterov}) {
            given.momentum = momentum;
            for (const bool copies : {false, true}) {
              given.copies = copies;
              given.limit = copies ? 1e30F : kNoLimit;
              const Outcome outcome = expect_reference(given);
              EXPECT(outcome.is_sound && (outcome.is_exact || !is_due));
              (outcome.is_exact ? exact : reused) = true;
            }
          }
        }
      }
      EXPECT(reused && exact);
      given.rule = {.k = k, .least = (k + 1) / 2};  // no threshold
      EXPECT(expect_reference(given).is_exact);
    }
  }
}

TEST("a reused threshold far below all entries, or above them, gives the results of the reference") {
  Case given = normal_case(40'003, 400, 2);
  for (const float threshold : {1e-30F, 0.5F, 1e30F}) {
    for (const bool is_due : {false, true}) {
      given.rule.threshold = threshold;
      given.rule.is_due = is_due;
      EXPECT(expect_reference(given).is_exact);
    }
  }
}

TEST("a reused threshold gives the results of the reference on long vectors") {
  Case given = normal_case((std::size_t{1} << 17) + 5, 1310, 5);
  given.copies = true;
  for (const float threshold : {3.6F, 2.0F, 1.0F, 9.0F, 0.0F}) {
    given.rule.threshold = threshold;
    for (const Momentum momentum : {Momentum::none, Momentum::classic, Momentum::nesterov}) {
      given.momentum = momentum;
      expect_reference(given);
    }
  }
  given.limit = INFINITY;
  given.gradient.back() = NAN;
  EXPECT(!expect_reference(given).is_sound);
}

TEST("a reused threshold takes entries that are alike, by their order") {
  Case given = normal_case(10'000, 100, 3);
  for (std::size_t i = 0; i < given.residual.size(); ++i) {
    given.residual[i] = i % 7 == 0 ? 2.0F : -1.0F;
    given.gradient[i] = i % 3 == 0 ? 1.0F : 0.0F;
  }
  for (const float threshold : {0.5F, 1.0F, 2.0F, 3.0F, 4.0F}) {
    given.rule.threshold = threshold;
    expect_reference(given);
  }
}

TEST("NaN and infinity end the selection at a limit, wherever they are") {
  for (const std::size_t where : {std::size_t{0}, std::size_t{17}, std::size_t{5000}, std::size_t{10'002}}) {
    for (const float value : {NAN, -NAN, INFINITY, -INFINITY}) {
      Case given = normal_case(10'003, 100, 4);
      given.gradient[where] = value;
      given.copies = true;
      given.limit = INFINITY;
      for (const float threshold : {3.0F, 0.01F, 9.0F, 0.0F}) {
        given.rule.threshold = threshold;
        for (const Momentum momentum : {Momentum::none, Momentum::classic}) {
          given.momentum = momentum;
          EXPECT(!expect_reference(given).is_sound);
        }
      }
    }
  }
  Case given = normal_case(10'003, 100, 4);
  given.gradient[9000] = -100.0F;
  given.copies = true;
  given.rule.threshold = 3.0F;
  given.limit = 100.0F;
  EXPECT(!expect_reference(given).is_sound);
  given.limit = 101.0F;
  EXPECT(expect_reference(given).is_sound);
  EXPECT(std::bit_cast<float>(expect_reference(given).added) == 100.0F);
}

}  // namespace
