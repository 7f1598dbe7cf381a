#include "linear/descent.hpp"

#include <algorithm>
#include <array>
#include <bit>

#include "base/check.hpp"

namespace telegrad::linear {
namespace {

// Below it the weights themselves are shrunk, before f32 loses what they are divided by.
constexpr double kSmallestScale = 1e-4;

constexpr std::size_t kAhead = 32;  // entries before their weight is needed, it is fetched

// Calls visit(i) where sums[i] is not 0. Of most dense sums most are 0: whole blocks are passed over.
template <class Visit>
void visit_dense(std::span<const float> sums, std::size_t begin, std::size_t end, const Visit& visit) {
  constexpr std::size_t kBlock = 64;
  for (std::size_t first = begin; first < end; first += kBlock) {
    const std::size_t last = std::min(first + kBlock, end);
    std::uint32_t any = 0;
    for (std::size_t i = first; i < last; ++i) any |= std::bit_cast<std::uint32_t>(sums[i]);
    if (any == 0) continue;
    for (std::size_t i = first; i < last; ++i) {
      if (sums[i] != 0) visit(i);
    }
  }
}

// AdaGrad's divisor of the learning rate is far above what keeps it from 0 after any step.
double pace_of(double squares) { return 1 / (std::sqrt(squares) + 1e-10); }

}  // namespace

Descent::Descent(std::size_t features, Rule rule, Penalty penalty, bool with_bias, Team& team,
                 const Numbering* numbering)
    : rule_(rule),
      penalty_(penalty),
      with_bias_(with_bias),
      team_(team),
      numbering_(numbering),
      weights_(features) {
  if (rule == Rule::adagrad) squares_.resize(features);
  const bool owes = penalty.l1 > 0 || (rule == Rule::adagrad && penalty.l2 > 0);
  if (!owes) return;
  last_.resize(features);
  if (rule == Rule::adagrad) paces_.resize(features);
  clock_.push_back(0);
}

ModelView Descent::view() const {
  return {weights_, scale_, bias_, last_.empty() ? nullptr : &owed_};
}

// Calls act(visit) with what a step does to one weight: visit(index, sum).
template <class Do>
auto Descent::by_rule(double rate, double rows, const Do& act) {
  const auto now = static_cast<std::uint32_t>(clock_.empty() ? 0 : clock_.size() - 1);
  float* const weights = weights_.data();
  if (rule_ == Rule::sgd) {
    const auto factor = static_cast<float>(rate / (rows * scale_));
    if (last_.empty()) return act([=](std::size_t index, float sum) { weights[index] -= factor * sum; });
    return act([=, this](std::size_t index, float sum) {
      if (sum == 0) return;
      weights[index] = owed_.settled(weights[index], index) - factor * sum;
      last_[index] = now;
    });
  }
  return act([=, this](std::size_t index, float sum) {
    if (sum == 0) return;
    const double gradient = static_cast<double>(sum) / rows;
    const float before = last_.empty() ? weights[index] : owed_.settled(weights[index], index);
    squares_[index] = static_cast<float>(static_cast<double>(squares_[index]) + gradient * gradient);
    const double pace = pace_of(static_cast<double>(squares_[index]));
    weights[index] = static_cast<float>(static_cast<double>(before) - rate * pace * gradient);
    if (last_.empty()) return;
    paces_[index] = static_cast<float>(pace);
    last_[index] = now;
  });
}

void Descent::step(std::span<const std::uint32_t> indices, std::span<const float> sums, double slope, double rate,
                   double rows) {
  by_rule(rate, rows, [&](const auto& visit) {
    team_.run([&](std::size_t part) {
      const std::size_t begin = sums.size() * part / team_.size(), end = sums.size() * (part + 1) / team_.size();
      if (indices.empty()) {
        visit_dense(sums, begin, end, [&](std::size_t i) { visit(place_of(static_cast<std::uint32_t>(i)), sums[i]); });
        return;
      }
      std::array<std::uint32_t, kAhead> places{};
      const auto prepare = [&](std::size_t i) {
        places[i % kAhead] = place_of(indices[i]);
        fetch(places[i % kAhead]);
      };
      for (std::size_t i = begin; i < std::min(begin + kAhead, end); ++i) prepare(i);
      for (std::size_t i = begin; i < end; ++i) {
        const std::uint32_t place = places[i % kAhead];
        if (i + kAhead < end) prepare(i + kAhead);
        visit(place, sums[i]);
      }
    });
  });
  finish_step(slope, rate, rows);
}

void Descent::fetch(std::size_t place) const {
  __builtin_prefetch(weights_.data() + place, 1);
  if (!squares_.empty()) __builtin_prefetch(squares_.data() + place, 1);
  if (last_.empty()) return;
  __builtin_prefetch(last_.data() + place, 1);
  if (!paces_.empty()) __builtin_prefetch(paces_.data() + place, 1);
}

std::size_t Descent::step(BatchGradient& gradient, double slope, double rate, double rows) {
  const std::size_t touched = by_rule(rate, rows, [&](const auto& visit) { return gradient.drain(visit); });
  finish_step(slope, rate, rows);
  return touched;
}

Descent::Alone Descent::step_alone(BatchGradient& gradient, const RowsView& rows, std::span<const float> targets,
                                   std::span<const std::uint64_t> chosen, Loss loss, double rate) {
  const auto count = static_cast<double>(chosen.size());
  if (rule_ == Rule::adagrad || !last_.empty()) {
    const BatchGradient::Sums sums = gradient.add(rows, targets, chosen, view(), loss);
    return {sums.loss, step(gradient, sums.slope, rate, count)};
  }
  const BatchGradient::Sums sums = gradient.find_slopes(rows, targets, chosen, view(), loss);
  const auto factor = static_cast<float>(rate / (count * scale_));
  const std::size_t entries = gradient.subtract_entries(rows, chosen, weights_, factor);
  finish_step(sums.slope, rate, count);
  return {sums.loss, entries};
}

void Descent::finish_step(double slope, double rate, double rows) {
  if (with_bias_) {
    const double gradient = slope / rows;
    bias_squares_ += gradient * gradient;
    const double own = rule_ == Rule::sgd ? rate : rate * pace_of(bias_squares_);
    bias_ -= own * gradient;
  }
  if (!last_.empty()) {
    clock_.push_back(clock_.back() + rate / scale_);
    see_owed();
  }
  if (rule_ == Rule::sgd) {
    scale_ /= 1 + rate * penalty_.l2;
    if (scale_ < kSmallestScale) settle();
  }
}

void Descent::settle() {
  // What is 0 stays so, and so does memory that nobody has written.
  for (std::size_t place = 0; place < weights_.size(); ++place) {
    if (weights_[place] != 0) weights_[place] = worth_at(place);
  }
  scale_ = 1;
  if (last_.empty()) return;
  for (std::uint32_t& last : last_) {
    if (last != 0) last = 0;
  }
  clock_.assign(1, 0);
  see_owed();
}

void Descent::see_owed() {
  owed_ = {last_, clock_, clock_.back(), paces_, penalty_.l1, rule_ == Rule::sgd ? 0 : penalty_.l2};
}

void Descent::write_weights(std::span<float> out) const {
  for (std::size_t i = 0; i < weights_.size(); ++i) out[i] = worth_at(place_of(static_cast<std::uint32_t>(i)));
}

void Descent::write_squares(std::span<float> out) const {
  for (std::size_t i = 0; i < squares_.size(); ++i) out[i] = squares_[place_of(static_cast<std::uint32_t>(i))];
}

void Descent::restore(std::span<const float> weights, std::span<const float> squares, double bias,
                      double bias_squares) {
  TELEGRAD_CHECK(weights.size() == weights_.size() && squares.size() == squares_.size());
  bias_ = bias;
  bias_squares_ = bias_squares;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const std::uint32_t place = place_of(static_cast<std::uint32_t>(i));
    // Most are 0, and so is the memory, which need not be there where nobody has written.
    if (weights[i] != 0) weights_[place] = weights[i];
    if (squares.empty() || (squares[i] == 0 && weights[i] == 0)) continue;
    squares_[place] = squares[i];
    if (!paces_.empty()) paces_[place] = static_cast<float>(pace_of(static_cast<double>(squares[i])));
  }
  if (!last_.empty()) see_owed();
}

}  // namespace telegrad::linear
