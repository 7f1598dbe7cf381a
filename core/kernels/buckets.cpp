#include "kernels/buckets.hpp"

#include <algorithm>
#include <bit>

#include "base/check.hpp"
#include "kernels/cut.hpp"
#include "kernels/scan_keys.hpp"
#include "kernels/select.hpp"

namespace telegrad::kernels {
namespace {

// By bisection of the keys: a bucket lies in the nearest cache, where counting costs less than a histogram.
Cut bisected_cut(std::span<const float> bucket, std::size_t k, std::int32_t highest) {
  constexpr std::int32_t kOctave = 1 << 23;  // what is looked for is seldom below half of the largest
  std::int32_t low = 0;                      // k entries have at least this key,
  std::int64_t high = std::int64_t{highest} + 1;  // and fewer have this one
  std::int64_t probe = std::max(highest - kOctave, 0);
  while (high - low > 1) {
    if (probe <= low) probe = low + (high - low) / 2;
    const auto key = static_cast<std::int32_t>(probe);
    const std::size_t count = count_at_least(bucket, key, Side::both);
    if (count == k) return {key - 1, 0};
    if (count > k) {
      low = key;
    } else {
      high = key;
    }
    probe = 0;
  }
  const std::size_t greater = low == highest ? 0 : count_at_least(bucket, low + 1, Side::both);
  return {low, k - greater};
}

// Selects `k` of one bucket; returns the largest key that stays.
using SelectBucket = std::int32_t(std::span<float> bucket, std::span<const float> gradient, std::size_t k,
                                  std::uint32_t index_offset, EntriesOut<float> out);

std::int32_t select_bucket(std::span<float> bucket, std::span<const float> gradient, std::size_t k,
                           std::uint32_t index_offset, EntriesOut<float> out) {
  const Moments moments = accumulate_moments(bucket, gradient, Side::both);
  const Cut cut = bisected_cut(bucket, k, std::bit_cast<std::int32_t>(moments.max));
  TELEGRAD_CHECK(move_cut(bucket, cut, Side::both, index_offset, out) == k);
  return cut.key;
}

std::int32_t select_bucket_by_reference(std::span<float> bucket, std::span<const float> gradient, std::size_t k,
                                        std::uint32_t index_offset, EntriesOut<float> out) {
  for (std::size_t i = 0; i < gradient.size(); ++i) bucket[i] += gradient[i];
  const Cut cut = reference::topk_cut(bucket, k, Side::both);
  TELEGRAD_CHECK(reference::move_cut(bucket, cut, Side::both, index_offset, out) == k);
  return cut.key;
}

Chosen select_buckets(SelectBucket* select, std::span<float> residual, std::span<const float> gradient,
                      std::size_t bucket, std::size_t per_bucket, std::size_t of_last, std::uint32_t index_offset,
                      EntriesOut<float> out) {
  TELEGRAD_CHECK(residual.size() == gradient.size() || gradient.empty());
  TELEGRAD_CHECK(residual.size() + index_offset <= std::uint64_t{1} << 32);
  TELEGRAD_CHECK(bucket >= 1 && per_bucket >= 1 && per_bucket <= bucket);
  const std::size_t rest = residual.size() % bucket;
  TELEGRAD_CHECK(of_last <= rest && (rest == 0 || of_last >= 1));
  const std::size_t count = residual.size() / bucket * per_bucket + of_last;
  TELEGRAD_CHECK(out.indices.size() == out.values.size() && out.capacity() >= count);
  std::size_t moved = 0;
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < residual.size(); i += bucket) {
    const std::size_t size = std::min(bucket, residual.size() - i);
    const std::size_t k = size == bucket ? per_bucket : of_last;
    const auto addend = gradient.empty() ? gradient : gradient.subspan(i, size);
    const EntriesOut<float> own{out.indices.subspan(moved, k), out.values.subspan(moved, k)};
    const std::int32_t stays =
        select(residual.subspan(i, size), addend, k, index_offset + static_cast<std::uint32_t>(i), own);
    largest = std::max(largest, stays);
    moved += k;
  }
  return {moved, 0.0F, std::bit_cast<float>(largest)};
}

}  // namespace

Chosen accumulate_buckets(std::span<float> residual, std::span<const float> gradient, std::size_t bucket,
                          std::size_t per_bucket, std::size_t of_last, std::uint32_t index_offset,
                          EntriesOut<float> out) {
  return select_buckets(select_bucket, residual, gradient, bucket, per_bucket, of_last, index_offset, out);
}

namespace reference {

Chosen accumulate_buckets(std::span<float> residual, std::span<const float> gradient, std::size_t bucket,
                          std::size_t per_bucket, std::size_t of_last, std::uint32_t index_offset,
                          EntriesOut<float> out) {
  return select_buckets(select_bucket_by_reference, residual, gradient, bucket, per_bucket, of_last, index_offset,
                        out);
}

}  // namespace reference

}  // namespace telegrad::kernels
