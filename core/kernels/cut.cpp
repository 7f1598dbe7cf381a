#include "kernels/cut.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "kernels/scan_keys.hpp"
#include "kernels/select.hpp"

namespace telegrad::kernels {
namespace {

constexpr unsigned kTopBits = 11;  // exponent and three bits of the mantissa
constexpr unsigned kRestBits = 10;
constexpr std::size_t kChunk = 1024;  // entries that are still in the nearest cache when they are looked at again

struct Bin {
  std::uint32_t digit;
  std::size_t k;     // rank of the answer among the bin's own entries
  std::size_t size;  // how many those are
};

// The bin in which the k-th largest lies, seen from the top.
Bin bin_of_kth(std::span<const std::uint32_t> histogram, std::size_t k) {
  for (std::size_t digit = histogram.size(); digit-- > 0;) {
    if (k <= histogram[digit]) return {static_cast<std::uint32_t>(digit), k, histogram[digit]};
    k -= histogram[digit];
  }
  TELEGRAD_CHECK(!"the histogram holds fewer than k entries");
  return {};
}

constexpr std::size_t kTopBins = std::size_t{1} << kTopBits;

// How many keys begin with each digit; negative keys are left out.
std::vector<std::uint32_t> top_histogram(std::span<const float> x, Side side) {
  const KeyBits key(side);
  // With the sign as one more bit of the digit: negative keys fill the upper half. Keys of gradients crowd into few
  // bins: four histograms in turn, so that no increment waits for the one before.
  std::vector<std::array<std::uint32_t, 2 * kTopBins>> parts(4);
  const auto digit = [&](float value) { return static_cast<std::uint32_t>(key(value)) >> (2 * kRestBits); };
  const std::size_t whole = x.size() / 4 * 4;
  for (std::size_t i = 0; i < whole; i += 4) {
    for (std::size_t j = 0; j < 4; ++j) ++parts[j][digit(x[i + j])];
  }
  for (std::size_t i = whole; i < x.size(); ++i) ++parts[0][digit(x[i])];
  std::vector<std::uint32_t> sums(kTopBins);
  for (std::size_t i = 0; i < kTopBins; ++i) sums[i] = parts[0][i] + parts[1][i] + parts[2][i] + parts[3][i];
  return sums;
}

// Keeps, in place, the keys whose digit of `bits` bits at `shift` is that of the k-th largest.
template <unsigned bits>
Bin narrow_to_digit(std::span<std::int32_t> keys, unsigned shift, std::size_t k) {
  constexpr std::uint32_t kDigit = (1U << bits) - 1U;
  const auto digit = [&](std::int32_t key) { return (static_cast<std::uint32_t>(key) >> shift) & kDigit; };
  std::array<std::uint32_t, std::size_t{1} << bits> histogram{};
  for (const std::int32_t key : keys) ++histogram[digit(key)];
  const Bin bin = bin_of_kth(histogram, k);
  std::size_t kept = 0;
  for (const std::int32_t key : keys) {
    keys[kept] = key;
    kept += digit(key) == bin.digit ? 1 : 0;
  }
  return bin;
}

Cut of_side(std::int32_t key, std::size_t ties, Side side) {
  return key < lowest_key(side) ? Cut{0, 0} : Cut{key, ties};  // a zero is of neither sign
}

// Among keys that agree in their top digit.
Cut cut_among(std::span<std::int32_t> keys, std::uint32_t top_digit, std::size_t k, Side side) {
  const Bin middle = narrow_to_digit<kRestBits>(keys, kRestBits, k);
  const Bin low = narrow_to_digit<kRestBits>(keys.first(middle.size), 0, middle.k);
  const std::uint32_t key = (top_digit << (2 * kRestBits)) | (middle.digit << kRestBits) | low.digit;
  return of_side(static_cast<std::int32_t>(key), low.k, side);
}

}  // namespace

Cut topk_cut(std::span<const float> x, std::size_t k, Side side) {
  TELEGRAD_CHECK(k <= x.size() && x.size() <= 0xffffffffU);
  if (k == 0) return {kHighestKey, 0};
  const std::vector<std::uint32_t> histogram = top_histogram(x, side);
  std::size_t there_are = 0;
  for (const std::uint32_t count : histogram) there_are += count;
  if (there_are < k) return {0, 0};
  const Bin top = bin_of_kth(histogram, k);
  const std::uint32_t first = top.digit << (2 * kRestBits);
  const std::uint32_t last = first | ((1U << (2 * kRestBits)) - 1U);
  const Array<std::int32_t> members(top.size + kCollectSlack);
  const std::size_t count = collect_keys(x, static_cast<std::int32_t>(first), static_cast<std::int32_t>(last), side,
                                         members.span(), top.size);
  TELEGRAD_CHECK(count == top.size);
  return cut_among(members.span().first(count), top.digit, top.k, side);
}

Cut topk_cut(std::span<std::int32_t> keys, std::size_t k, Side side) {
  if (k == 0) return {kHighestKey, 0};
  if (keys.size() < k) return {0, 0};
  const Bin top = narrow_to_digit<kTopBits>(keys, 2 * kRestBits, k);
  return cut_among(keys.first(top.size), top.digit, top.k, side);
}

std::size_t move_cut(std::span<float> x, const Cut& cut, Side side, std::uint32_t index_offset, EntriesOut<float> out) {
  TELEGRAD_CHECK(x.size() + index_offset <= std::uint64_t{1} << 32);
  const KeyBits key(side);
  std::size_t ties = cut.ties;
  std::size_t moved = 0;
  const auto select = [&](std::size_t begin, std::size_t end, std::int32_t bound) {
    moved += accumulate_select(x.subspan(begin, end - begin), {}, bound, side,
                               index_offset + static_cast<std::uint32_t>(begin),
                               {out.indices.subspan(moved), out.values.subspan(moved)});
    TELEGRAD_CHECK(moved <= out.capacity());
  };
  std::size_t i = 0;
  while (i < x.size() && ties != 0) {  // of a chunk either all ties are moved, or it is cut behind the last one
    std::size_t end = std::min(i + kChunk, x.size());
    const std::span<const float> chunk = x.subspan(i, end - i);
    std::size_t equal = count_at_least(chunk, cut.key, side);
    if (cut.key != kHighestKey) equal -= count_at_least(chunk, cut.key + 1, side);
    if (equal > ties) {
      std::size_t seen = 0;
      end = i;
      while (seen < ties) seen += key(x[end++]) == cut.key ? 1 : 0;
      equal = ties;
    }
    ties -= equal;
    select(i, end, cut.key);
    i = end;
  }
  if (cut.key != kHighestKey) select(i, x.size(), cut.key + 1);
  return moved;
}

namespace reference {

Cut topk_cut(std::span<const float> x, std::size_t k, Side side) {
  TELEGRAD_CHECK(k <= x.size());
  std::vector<std::int32_t> keys(x.size());
  std::transform(x.begin(), x.end(), keys.begin(), KeyBits(side));
  std::erase_if(keys, [&](std::int32_t key) { return key < lowest_key(side); });
  if (k == 0) return {kHighestKey, 0};
  if (keys.size() < k) return {0, 0};
  std::sort(keys.begin(), keys.end(), std::greater<>());
  const std::int32_t last = keys[k - 1];
  const auto first_equal = std::find(keys.begin(), keys.end(), last);
  return {last, k - static_cast<std::size_t>(first_equal - keys.begin())};
}

std::size_t move_cut(std::span<float> x, const Cut& cut, Side side, std::uint32_t index_offset, EntriesOut<float> out) {
  const KeyBits key(side);
  std::size_t ties = cut.ties;
  std::size_t moved = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const bool tied = key(x[i]) == cut.key && ties != 0;
    if (tied) --ties;
    if (!tied && key(x[i]) <= cut.key) continue;
    TELEGRAD_CHECK(moved < out.capacity());
    out.indices[moved] = index_offset + static_cast<std::uint32_t>(i);
    out.values[moved++] = x[i];
    x[i] = 0.0F;
  }
  return moved;
}

}  // namespace reference

}  // namespace telegrad::kernels
