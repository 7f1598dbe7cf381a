#include "kernels/candidates.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>

#include "base/check.hpp"
#include "kernels/scan_keys.hpp"

namespace telegrad::kernels {
namespace {

constexpr std::size_t kSmall = std::size_t{1} << 15;  // below, sampling costs more than it saves
constexpr std::size_t kSample = std::size_t{1} << 13;
constexpr std::size_t kSlack = 32;  // with this room to spare, a pass never packs one by one

// A key that somewhat more than `wanted` of the sums should reach, by a sample, never below 1; 0 where `wanted` is too
// large a share for that.
std::int32_t sampled_bound(std::span<const float> residual, std::span<const float> gradient, std::size_t wanted,
                           Side side) {
  const double share = static_cast<double>(wanted) / static_cast<double>(residual.size());
  const double expected = share * static_cast<double>(kSample);
  // Four standard deviations beyond the expected rank, and some for luck: a miss costs more passes.
  const auto rank = static_cast<std::size_t>(expected + 4.0 * __builtin_sqrt(expected) + 8.0);
  if (rank > kSample / 2) return 0;
  const KeyBits key(side);
  std::array<std::int32_t, kSample> sample;
  std::uint64_t state = 0x9e3779b97f4a7c15U;
  for (std::int32_t& own : sample) {  // no stride: it could follow the columns of a matrix
    state = state * 6364136223846793005U + 1442695040888963407U;
    const std::uint64_t position = ((state >> 32) * residual.size()) >> 32;
    own = key(gradient.empty() ? residual[position] : residual[position] + gradient[position]);
  }
  const auto at = sample.begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(sample.begin(), at, sample.end(), std::greater<>());
  return std::max(*at, 1);
}

}  // namespace

Candidates::Candidates(std::span<float> residual, std::span<const float> gradient, std::size_t wanted, Side side,
                       bool with_moments)
    : residual_(residual), side_(side) {
  TELEGRAD_CHECK(residual.size() == gradient.size() || gradient.empty());
  if (residual.size() >= kSmall) lowest_ = sampled_bound(residual, gradient, wanted, side);
  if (lowest_ != 0) {
    taken_ = take(gradient, wanted, with_moments);
  } else if (with_moments) {
    moments_ = accumulate_moments(residual, gradient, side);
  } else if (!gradient.empty()) {
    accumulate_select(residual, gradient, kHighestKey, side, 0, {});  // what reaches that stays too
  }
}

bool Candidates::take(std::span<const float> gradient, std::size_t wanted, bool with_moments) {
  const std::size_t most = std::min(residual_.size(), std::max(2 * wanted, residual_.size() / 64));
  indices_ = Array<std::uint32_t>(most + kSlack);
  values_ = Array<float>(most + kSlack);
  count_ = accumulate_select(residual_, gradient, lowest_, side_, 0, {indices_.span(), values_.span()},
                             with_moments ? &moments_ : nullptr);
  // Where the bound is as low as it can be, they are all that is not zero, however few.
  if (count_ <= most + kSlack && (count_ >= wanted || lowest_ == 1)) return true;
  put_back(std::min(count_, most + kSlack));
  return false;
}

void Candidates::put_back(std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) residual_[indices_[i]] = values_[i];
}

std::size_t Candidates::count_at_least(std::int32_t bound) const {
  if (!taken_) return kernels::count_at_least(residual_, bound, side_);
  if (bound >= lowest_) return kernels::count_at_least(values_.span().first(count_), bound, side_);
  return lowest_ == 1 ? residual_.size() : count_;  // below 1 are zeros, of both signs
}

Cut Candidates::topk(std::size_t k, std::int32_t bound, std::size_t count) const {
  if (taken_ && count_ < k) return side_ == Side::both ? Cut{0, k - count_} : Cut{0, 0};
  const std::span<const float> x = taken_ ? values_.span().first(count_) : residual_;
  if (!taken_ && bound <= lowest_key(side_)) return topk_cut(x, k, side_);
  const std::size_t most = taken_ ? std::min(count, count_) : count;
  const Array<std::int32_t> keys(most + kCollectSlack);
  const std::size_t kept = collect_keys(x, taken_ ? std::max(bound, lowest_) : bound, kHighestKey, side_, keys.span(), most);
  return topk_cut(keys.span().first(kept), k, side_);
}

std::size_t Candidates::move(const Cut& cut, std::uint32_t index_offset, EntriesOut<float> out) {
  TELEGRAD_CHECK(residual_.size() + index_offset <= std::uint64_t{1} << 32);
  if (taken_ && (cut.key < lowest_ - 1 || (cut.key == lowest_ - 1 && cut.ties != 0))) {
    put_back(count_);
    taken_ = false;
  }
  if (!taken_) return move_cut(residual_, cut, side_, index_offset, out);
  // Without branches, which would be mispredicted every other time: each is written to the end of both lists.
  const KeyBits key(side_);
  Array<std::uint32_t> indices(count_ + 1);
  Array<float> values(count_ + 1);
  std::size_t ties = cut.ties, moved = 0, kept = 0;
  for (std::size_t i = 0; i < count_; ++i) {
    const float value = values_[i];
    const std::uint32_t index = indices_[i];
    const std::int32_t own = key(value);
    const std::size_t tied = static_cast<std::size_t>(own == cut.key) & static_cast<std::size_t>(ties != 0);
    const std::size_t chosen = static_cast<std::size_t>(own > cut.key) | tied;
    ties -= tied;
    indices[moved] = index + index_offset;
    values[moved] = value;
    indices_[kept] = index;
    values_[kept] = value;
    moved += chosen;
    kept += 1 - chosen;
  }
  TELEGRAD_CHECK(moved <= out.capacity());
  std::copy_n(indices.begin(), moved, out.indices.begin());
  std::copy_n(values.begin(), moved, out.values.begin());
  put_back(kept);
  return moved;
}

}  // namespace telegrad::kernels
