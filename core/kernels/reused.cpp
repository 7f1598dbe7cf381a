#include "kernels/reused.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "kernels/candidates.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/elementwise.hpp"
#include "kernels/key.hpp"
#include "kernels/ranked.hpp"
#include "kernels/select.hpp"

namespace telegrad::kernels {
namespace {

// Residual, gradient, velocity and what the first and the last were: 80 KiB at most, in the second cache.
constexpr std::size_t kBlock = 4096;
constexpr std::size_t kLongBlock = 8 * kBlock;  // where there is one thing to do
constexpr std::size_t kSlack = 32;

constexpr std::int32_t kInfinite = 0x7f800000;  // the key of infinity, to which only that and NaN come up

// What a look for the k largest begins with, of the last threshold: most often somewhat more than k entries reach it.
constexpr float kBelowThreshold = 0.9F;

struct Moving {
  float* velocity;
  const float* before;
  const float* gradient;
  float* sum;  // with Nesterov momentum what is added to the residual
  std::size_t count;
  float factor;
};

using MoveFunction = void(const Moving& moving);
using LargestFunction = std::uint32_t(const float* x, std::size_t count);

// `velocity` may be `before`: each entry is read before it is written, so that the loops are free to be vectorised.
template <bool nesterov>
TELEGRAD_INTO_CALLER void move_all(const Moving& given) {
  const Moving moving = given;  // a copy that the stores cannot alias
#pragma GCC ivdep
  for (std::size_t i = 0; i < moving.count; ++i) {
    const float gradient = moving.gradient[i];
    if constexpr (nesterov) {
      const float velocity = (moving.before[i] + gradient) * moving.factor;
      moving.velocity[i] = velocity;
      moving.sum[i] = gradient + velocity;
    } else {
      const float kept = moving.before[i] * moving.factor;
      moving.velocity[i] = kept + gradient;
    }
  }
}

// Bits of magnitudes have the order of magnitudes, and NaN above infinity.
TELEGRAD_INTO_CALLER std::uint32_t largest_of(const float* x, std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(x[i]));
  return largest;
}

void velocity_portable(const Moving& moving) { move_all<false>(moving); }
void nesterov_portable(const Moving& moving) { move_all<true>(moving); }
std::uint32_t largest_portable(const float* x, std::size_t count) { return largest_of(x, count); }

#ifdef TELEGRAD_KERNELS_X86

TELEGRAD_AVX2 void velocity_avx2(const Moving& moving) { move_all<false>(moving); }
TELEGRAD_AVX2 void nesterov_avx2(const Moving& moving) { move_all<true>(moving); }
TELEGRAD_AVX2 std::uint32_t largest_avx2(const float* x, std::size_t count) { return largest_of(x, count); }
TELEGRAD_AVX512 void velocity_avx512(const Moving& moving) { move_all<false>(moving); }
TELEGRAD_AVX512 void nesterov_avx512(const Moving& moving) { move_all<true>(moving); }
TELEGRAD_AVX512 std::uint32_t largest_avx512(const float* x, std::size_t count) { return largest_of(x, count); }

constexpr Variants<MoveFunction> kVelocity{velocity_portable, velocity_avx2, velocity_avx512};
constexpr Variants<MoveFunction> kNesterov{nesterov_portable, nesterov_avx2, nesterov_avx512};
constexpr Variants<LargestFunction> kLargest{largest_portable, largest_avx2, largest_avx512};

#else

constexpr Variants<MoveFunction> kVelocity{velocity_portable};
constexpr Variants<MoveFunction> kNesterov{nesterov_portable};
constexpr Variants<LargestFunction> kLargest{largest_portable};

#endif

// Those that a pass has taken out: the first ones where the caller wants them, the others in memory of its own.
class Taken {
 public:
  Taken(EntriesOut<float> out, std::size_t most) : out_(out), most_(most) {}

  // Where a block's entries go.
  EntriesOut<float> room() {
    if (!spills_) return {out_.indices.subspan(count_), out_.values.subspan(count_)};
    const std::size_t used = std::min(spilled_, most_ + kSlack);
    return {indices_.span().subspan(used), values_.span().subspan(used)};
  }
  // So many reached the bound in a block. False: room() could not hold them, and they are back; it can now.
  bool took(std::size_t count, std::span<float> residual, std::uint32_t index_offset) {
    if (spills_) {
      spilled_ += count;
      return true;
    }
    const EntriesOut<float> used = room();
    if (count <= used.capacity()) {
      count_ += count;
      return true;
    }
    for (std::size_t i = 0; i < used.capacity(); ++i) residual[used.indices[i] - index_offset] = used.values[i];
    indices_ = Array<std::uint32_t>(most_ + kSlack);
    values_ = Array<float>(most_ + kSlack);
    spills_ = true;
    return false;
  }

  std::size_t count() const { return count_ + spilled_; }
  bool are_all() const { return spilled_ <= most_ + kSlack; }  // the others have stayed in the residual

  // All of them, which `out` can hold, are there.
  void join() {
    std::copy_n(indices_.begin(), spilled_, out_.indices.begin() + static_cast<std::ptrdiff_t>(count_));
    std::copy_n(values_.begin(), spilled_, out_.values.begin() + static_cast<std::ptrdiff_t>(count_));
  }
  void put_back(std::span<float> residual, std::uint32_t index_offset) const {
    for (std::size_t i = 0; i < count_; ++i) residual[out_.indices[i] - index_offset] = out_.values[i];
    const std::size_t held = std::min(spilled_, most_ + kSlack);
    for (std::size_t i = 0; i < held; ++i) residual[indices_[i] - index_offset] = values_[i];
  }
  // Whether a value, of those that did not stay in the residual, is `limit` in magnitude or more, or NaN.
  bool reach(float limit) const {
    const std::size_t held = std::min(spilled_, most_ + kSlack);
    const std::uint32_t largest = std::max(kLargest(out_.values.data(), count_), kLargest(values_.data(), held));
    return largest >= std::bit_cast<std::uint32_t>(limit);
  }
  // All of them, by position in the residual.
  Candidates candidates(std::span<float> residual, std::int32_t lowest, std::uint32_t index_offset) const {
    Array<std::uint32_t> indices(count());
    Array<float> values(count());
    std::copy_n(out_.values.begin(), count_, values.begin());
    std::copy_n(values_.begin(), spilled_, values.begin() + count_);
    const auto position = [index_offset](std::uint32_t index) { return index - index_offset; };
    std::transform(out_.indices.begin(), out_.indices.begin() + static_cast<std::ptrdiff_t>(count_), indices.begin(),
                   position);
    std::transform(indices_.begin(), indices_.begin() + spilled_, indices.begin() + count_, position);
    return {residual, Side::both, lowest, std::move(indices), std::move(values)};
  }

 private:
  EntriesOut<float> out_;
  std::size_t most_;
  Array<std::uint32_t> indices_;
  Array<float> values_;
  std::size_t count_ = 0, spilled_ = 0;
  bool spills_ = false;
};

void check(std::span<float> residual, std::span<const float> before, std::span<const float> gradient,
           const VelocityStep& step, const ReuseRule& rule, EntriesOut<float> out, float limit) {
  const std::size_t size = residual.size();
  TELEGRAD_CHECK(gradient.size() == size && (before.empty() || before.size() == size));
  TELEGRAD_CHECK(step.velocity.empty() || step.velocity.size() == size);
  TELEGRAD_CHECK(step.before.empty() || step.before.size() == step.velocity.size());
  TELEGRAD_CHECK(rule.k >= 1 && rule.k <= size);
  TELEGRAD_CHECK(out.indices.size() == out.values.size() && out.capacity() >= std::min(2 * rule.k, size));
  TELEGRAD_CHECK(std::isnan(limit) || (!before.empty() && step.before.size() == step.velocity.size()));
}

// One pass: entries with a key of at least `bound` into `taken`. False where it met the limit: a gradient without momentum
// that is NaN or infinite is found by its sum, which is taken.
bool pass(std::span<float> residual, std::span<const float> before, std::span<const float> gradient,
          const VelocityStep& step, std::int32_t bound, std::uint32_t index_offset, Taken& taken, float limit,
          std::uint32_t& largest) {
  alignas(64) float sum[kBlock];
  const bool moves = !step.velocity.empty(), by_sums = !moves && std::isinf(limit);
  const bool looks = !std::isnan(limit) && !by_sums;
  const std::size_t block = looks || moves ? kBlock : kLongBlock;
  for (std::size_t begin = 0; begin < residual.size(); begin += block) {
    const std::size_t size = std::min(block, residual.size() - begin);
    const std::span<float> own = residual.subspan(begin, size);
    std::span<const float> added = gradient.subspan(begin, size);
    if (looks || moves) {
      largest = std::max(largest, kLargest(added.data(), size));
      if (looks && largest >= std::bit_cast<std::uint32_t>(limit)) return false;
    }
    if (moves) {
      float* const velocity = step.velocity.data() + begin;
      const float* const velocity_before = step.before.empty() ? velocity : step.before.data() + begin;
      (step.nesterov ? kNesterov : kVelocity)(Moving{velocity, velocity_before, added.data(), sum, size, step.factor});
      added = {step.nesterov ? sum : velocity, size};
    }
    const std::uint32_t first = index_offset + static_cast<std::uint32_t>(begin);
    const std::span<const float> own_before = before.empty() ? before : before.subspan(begin, size);
    const std::size_t count =
        accumulate_select(own, added, bound, Side::both, first, taken.room(), nullptr, own_before);
    if (!taken.took(count, residual, index_offset)) {
      taken.took(accumulate_select(own, {}, bound, Side::both, first, taken.room()), residual, index_offset);
    }
  }
  if (by_sums && !taken.are_all()) return kLargest(gradient.data(), gradient.size()) < std::bit_cast<std::uint32_t>(limit);
  return !by_sums || !taken.reach(limit);
}

void mask(const VelocityStep& step, std::span<const std::uint32_t> indices, std::uint32_t index_offset) {
  if (!step.masks) return;
  for (const std::uint32_t index : indices) step.velocity[index - index_offset] = 0.0F;
}

}  // namespace

Reused accumulate_reused(std::span<float> residual, std::span<const float> before, std::span<const float> gradient,
                         const VelocityStep& step, const ReuseRule& rule, std::uint32_t index_offset,
                         EntriesOut<float> out, float limit) {
  check(residual, before, gradient, step, rule, out, limit);
  const std::size_t size = residual.size(), most = std::min(2 * rule.k, size);
  out = {out.indices.first(most), out.values.first(most)};
  const bool has_threshold = rule.threshold > 0.0F, reuses = has_threshold && !rule.is_due;
  const float sought = reuses ? rule.threshold : rule.threshold * kBelowThreshold;
  const std::int32_t bound = has_threshold ? std::max(key_of_threshold(sought, Side::both), 1) : kInfinite;
  Taken taken(out, std::min(4 * rule.k, size));
  Reused found;
  std::uint32_t largest = 0;
  found.is_sound = pass(residual, before, gradient, step, bound, index_offset, taken, limit, largest);
  if (!found.is_sound) return found;
  found.added = std::bit_cast<float>(largest);
  found.count = taken.count();
  if (reuses && found.count >= rule.least && found.count <= most && taken.are_all()) {
    taken.join();
    found.threshold = found.largest = rule.threshold;
  } else {
    found.is_exact = true;
    const Chosen chosen = [&] {
      if (taken.are_all() && found.count >= rule.k) {
        Candidates sums = taken.candidates(residual, bound, index_offset);
        return move_topk(sums, rule.k, size, index_offset, out);
      }
      taken.put_back(residual, index_offset);
      return accumulate_topk(residual, {}, rule.k, Side::both, index_offset, out);
    }();
    found.count = chosen.count;
    found.threshold = chosen.threshold;
    found.largest = chosen.largest;
  }
  mask(step, out.indices.first(found.count), index_offset);
  return found;
}

namespace reference {

Reused accumulate_reused(std::span<float> residual, std::span<const float> before, std::span<const float> gradient,
                         const VelocityStep& step, const ReuseRule& rule, std::uint32_t index_offset,
                         EntriesOut<float> out, float limit) {
  check(residual, before, gradient, step, rule, out, limit);
  const std::size_t size = residual.size();
  Reused found;
  for (const float one : gradient) {
    if (magnitude_bits(one) > magnitude_bits(found.added)) found.added = std::fabs(one);
  }
  if (!std::isnan(limit) && !(found.added < limit)) return {.is_sound = false};
  for (std::size_t i = 0; i < size; ++i) {
    float added = gradient[i];
    if (!step.velocity.empty()) {
      const float was = step.before.empty() ? step.velocity[i] : step.before[i];
      float& velocity = step.velocity[i];
      velocity = step.nesterov ? (was + gradient[i]) * step.factor : was * step.factor;
      if (!step.nesterov) velocity += gradient[i];
      added = step.nesterov ? gradient[i] + velocity : velocity;
    }
    residual[i] = (before.empty() ? residual[i] : before[i]) + added;
  }
  const auto reaches = [&](float x) { return std::fabs(x) >= rule.threshold; };
  if (rule.threshold > 0.0F && !rule.is_due) {
    found.count = static_cast<std::size_t>(std::count_if(residual.begin(), residual.end(), reaches));
  }
  if (rule.threshold > 0.0F && !rule.is_due && found.count >= rule.least && found.count <= 2 * rule.k) {
    found.threshold = found.largest = rule.threshold;
    reference::accumulate_select(residual, {}, key_of_threshold(rule.threshold, Side::both), Side::both, index_offset, out);
  } else {
    const Chosen chosen = reference::accumulate_topk(residual, {}, rule.k, Side::both, index_offset, out);
    found.is_exact = true;
    found.count = chosen.count;
    found.threshold = chosen.threshold;
    found.largest = chosen.largest;
  }
  mask(step, out.indices.first(found.count), index_offset);
  return found;
}

}  // namespace reference

}  // namespace telegrad::kernels
