#include "kernels/ranked.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/check.hpp"
#include "kernels/candidates.hpp"
#include "kernels/scan_keys.hpp"

namespace telegrad::kernels {
namespace {

// A selection's way to its cut sees the sums through one of these: Candidates, or the plain passes of the reference.
class WholeResidual {
 public:
  WholeResidual(std::span<float> residual, std::span<const float> gradient, Side side)
      : residual_(residual), side_(side) {
    reference::accumulate_select(residual, gradient, kHighestKey, side, 0, {}, &moments_);
  }
  const Moments& moments() const { return moments_; }
  std::size_t count_at_least(std::int32_t bound) const { return reference::count_at_least(residual_, bound, side_); }
  Cut topk(std::size_t k, std::int32_t, std::size_t) const { return reference::topk_cut(residual_, k, side_); }
  std::size_t move(const Cut& cut, std::uint32_t index_offset, EntriesOut<float> out) {
    return reference::move_cut(residual_, cut, side_, index_offset, out);
  }

 private:
  std::span<float> residual_;
  Side side_;
  Moments moments_;
};

template <class Sums>
Cut exact(const Sums& sums, std::size_t k, Side side, std::size_t size) {
  return sums.topk(k, lowest_key(side), size);
}

// A mean or a maximum that is not finite says nothing about the others.
bool describe_something(const Moments& moments) { return std::isfinite(moments.sum) && std::isfinite(moments.max); }

std::int32_t bound_at(const Moments& moments, double ratio, Side side) {
  const double mean = moments.mean();
  return key_of_threshold(static_cast<float>(mean + ratio * (static_cast<double>(moments.max) - mean)), side);
}

template <class Sums>
Cut trimmed(const Sums& sums, std::size_t k, double step, Side side, std::size_t size) {
  if (!describe_something(sums.moments())) return exact(sums, k, side, size);
  double ratio = 1.0;
  for (int steps = 1; ratio > 0.0; ++steps) {
    ratio = std::max(0.0, 1.0 - steps * step);
    const std::int32_t bound = bound_at(sums.moments(), ratio, side);
    const std::size_t count = sums.count_at_least(bound);
    if (count >= k) return sums.topk(k, bound, count);
  }
  return exact(sums, k, side, size);
}

template <class Sums>
Cut searched(const Sums& sums, std::size_t k, double tolerance, Side side, std::size_t size) {
  if (!describe_something(sums.moments())) return exact(sums, k, side, size);
  double low = 0.0, high = 1.0;
  while (high - low > tolerance) {
    const double ratio = low + (high - low) / 2.0;
    const std::int32_t bound = bound_at(sums.moments(), ratio, side);
    const std::size_t count = sums.count_at_least(bound);
    if (count < k) {
      high = ratio;
    } else if (count > 2 * k) {
      low = ratio;
    } else {
      return {bound - 1, 0};
    }
  }
  return exact(sums, k, side, size);
}

template <class Sums>
Chosen move(Sums& sums, const Cut& cut, Side side, std::uint32_t index_offset, EntriesOut<float> out) {
  const std::size_t count = sums.move(cut, index_offset, out);
  const std::int32_t lowest = cut.ties != 0 ? cut.key : cut.key + 1;
  const float stays = std::bit_cast<float>(std::max(cut.key, 0));
  return {count, std::bit_cast<float>(lowest), side == Side::both ? stays : sums.moments().largest};
}

void check_out(std::span<const float> residual, std::size_t k, std::size_t most, EntriesOut<float> out) {
  TELEGRAD_CHECK(k >= 1 && k <= residual.size());
  TELEGRAD_CHECK(out.indices.size() == out.values.size() && out.capacity() >= std::min(most, residual.size()));
}

}  // namespace

Chosen accumulate_topk(std::span<float> residual, std::span<const float> gradient, std::size_t k, Side side,
                       std::uint32_t index_offset, EntriesOut<float> out) {
  check_out(residual, k, k, out);
  Candidates sums(residual, gradient, k, side, side != Side::both);
  return move(sums, exact(sums, k, side, residual.size()), side, index_offset, out);
}

Chosen move_topk(Candidates& sums, std::size_t k, std::size_t size, std::uint32_t index_offset, EntriesOut<float> out) {
  return move(sums, exact(sums, k, Side::both, size), Side::both, index_offset, out);
}

Chosen accumulate_trimmed(std::span<float> residual, std::span<const float> gradient, std::size_t k, double step,
                          Side side, std::uint32_t index_offset, EntriesOut<float> out) {
  check_out(residual, k, k, out);
  TELEGRAD_CHECK(step > 0.0 && step < 1.0);
  Candidates sums(residual, gradient, k, side, true);
  return move(sums, trimmed(sums, k, step, side, residual.size()), side, index_offset, out);
}

Chosen accumulate_search(std::span<float> residual, std::span<const float> gradient, std::size_t k, double tolerance,
                         Side side, std::uint32_t index_offset, EntriesOut<float> out) {
  check_out(residual, k, 2 * k, out);
  TELEGRAD_CHECK(tolerance > 0.0 && tolerance < 1.0);
  Candidates sums(residual, gradient, 2 * k + 1, side, true);
  return move(sums, searched(sums, k, tolerance, side, residual.size()), side, index_offset, out);
}

namespace reference {

Chosen accumulate_topk(std::span<float> residual, std::span<const float> gradient, std::size_t k, Side side,
                       std::uint32_t index_offset, EntriesOut<float> out) {
  check_out(residual, k, k, out);
  WholeResidual sums(residual, gradient, side);
  return move(sums, exact(sums, k, side, residual.size()), side, index_offset, out);
}

Chosen accumulate_search(std::span<float> residual, std::span<const float> gradient, std::size_t k, double tolerance,
                         Side side, std::uint32_t index_offset, EntriesOut<float> out) {
  check_out(residual, k, 2 * k, out);
  WholeResidual sums(residual, gradient, side);
  return move(sums, searched(sums, k, tolerance, side, residual.size()), side, index_offset, out);
}

}  // namespace reference

}  // namespace telegrad::kernels
