// Radix selection, the most significant bits first: all ranks count how many of their values have which next digit among
// those that agree in the digits before. The first digit is the exponent, of which few values are in use; the others are
// the smaller the smaller k is, so that counts weigh less than entries. What is left once few values agree is gathered.
// 3·log2 P messages as a rule. (Ok-Topk's paper, §3.1.4, gathers all sums on every rank, which is up to P·k entries.)
#include "collectives/topk/threshold.hpp"

#include <algorithm>
#include <bit>
#include <vector>

#include "codec/sparse_vector.hpp"
#include "codec/varint.hpp"
#include "collectives/support/sum_counts.hpp"

namespace telegrad {
namespace {

template <class V>
constexpr unsigned kBits = 8 * sizeof(V) - 1;  // of a key

// Of a digit behind the exponent: about the root of k.
unsigned digit_bits(std::uint64_t k) { return std::clamp(static_cast<unsigned>(std::bit_width(k)) / 2, 4U, 8U); }
std::uint64_t gathered_most(std::uint64_t k) { return std::clamp<std::uint64_t>(k / 16, 64, 1024); }

}  // namespace

template <class V>
Task<std::uint64_t> global_threshold_key(Transport& net, std::span<const V> values, std::uint64_t k, std::uint64_t most,
                                         SparseTraffic& traffic, Step first_step) {
  std::uint64_t prefix = 0;
  std::uint64_t wanted = k;
  std::vector<std::uint64_t> counts;
  unsigned left = kBits<V>;  // bits behind the prefix
  for (Step step = first_step; left > 0; step += kSumCountsSteps) {
    const unsigned bits = left == kBits<V> ? left - kMantissaBits<V> : std::min(left, digit_bits(k));
    const unsigned behind = left - bits;
    counts.assign(std::size_t{1} << bits, 0);
    co_await compute_slices(net, values.size(), sizeof(V), [&](std::size_t begin, std::size_t end) {
      for (const V value : values.subspan(begin, end - begin)) {
        const std::uint64_t key = magnitude_key(value) >> behind;
        if (key >> bits == prefix) ++counts[key & (counts.size() - 1)];
      }
    });
    co_await sum_counts(net, counts, 0, most, traffic, step);
    std::size_t digit = counts.size() - 1;
    for (; digit > 0 && counts[digit] < wanted; --digit) wanted -= counts[digit];
    if (counts[digit] < wanted) co_return 0;
    prefix = prefix << bits | digit;
    left = behind;
    if (left == 0 || counts[digit] > gathered_most(k)) continue;
    std::vector<std::uint64_t> rests;
    co_await compute_slices(net, values.size(), sizeof(V), [&](std::size_t begin, std::size_t end) {
      for (const V value : values.subspan(begin, end - begin)) {
        const std::uint64_t key = magnitude_key(value);
        if (key >> left == prefix) rests.push_back(key & ((std::uint64_t{1} << left) - 1));
      }
    });
    co_await merge_keys(net, rests, static_cast<std::size_t>(counts[digit]), traffic, step + kSumCountsSteps);
    if (rests.size() < wanted) co_return prefix << left;  // of damaged counts
    co_return prefix << left | rests[rests.size() - static_cast<std::size_t>(wanted)];
  }
  co_return prefix;
}

template <class V>
std::uint64_t threshold_bytes_most(std::uint64_t k, Rank ranks, std::uint64_t total) {
  const unsigned bits = digit_bits(k);
  const std::uint64_t digits = (kMantissaBits<V> + bits - 1) / bits;
  const std::uint64_t counts = sum_counts_bytes_most(std::size_t{1} << (kBits<V> - kMantissaBits<V>), ranks, total) +
                               digits * sum_counts_bytes_most(std::size_t{1} << bits, ranks, total);
  const std::uint64_t keys = varints_bytes_most(gathered_most(k), std::uint64_t{1} << kMantissaBits<V>);
  return counts + std::bit_width(ranks - 1) * keys;
}

#define TELEGRAD_INSTANTIATE(V) \
  template std::uint64_t threshold_bytes_most<V>(std::uint64_t, Rank, std::uint64_t); \
  template Task<std::uint64_t> global_threshold_key(Transport&, std::span<const V>, std::uint64_t, std::uint64_t, \
                                                    SparseTraffic&, Step);
TELEGRAD_FOR_FLOAT_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
