// Radix selection, the most significant byte first: all ranks count how many of their values have which next byte among
// those that agree in the bytes before, and the counts are allreduced; a float takes 4·log2 P messages of 2 KiB. (Ok-Topk's
// paper, §3.1.4, gathers all sums on every rank instead, which is up to P·k entries.)
#include "collectives/topk/threshold.hpp"

#include <array>

#include "codec/sparse_vector.hpp"
#include "collectives/support/allreduce_counts.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kBuckets = 256;

}  // namespace

template <class V>
Task<std::uint64_t> global_threshold_key(Transport& net, std::span<const V> values, std::uint64_t k,
                                         SparseTraffic& traffic, Step first_step) {
  std::uint64_t prefix = 0;
  std::uint64_t wanted = k;
  std::array<std::uint64_t, kBuckets> counts{};
  for (std::size_t byte = 0; byte < sizeof(V); ++byte) {
    const std::size_t shift = 8 * (sizeof(V) - 1 - byte);
    counts.fill(0);
    co_await compute_slices(net, values.size(), sizeof(V), [&](std::size_t begin, std::size_t end) {
      for (const V value : values.subspan(begin, end - begin)) {
        const std::uint64_t key = magnitude_key(value) >> shift;
        if (key >> 8 == prefix) ++counts[key & (kBuckets - 1)];
      }
    });
    co_await allreduce_counts(net, counts, 0, traffic, first_step + static_cast<Step>(byte) * kCountSteps);
    std::size_t bucket = kBuckets - 1;
    for (; bucket > 0 && counts[bucket] < wanted; --bucket) wanted -= counts[bucket];
    if (counts[bucket] < wanted) co_return 0;
    prefix = prefix << 8 | bucket;
  }
  co_return prefix;
}

#define TELEGRAD_INSTANTIATE(V) \
  template Task<std::uint64_t> global_threshold_key(Transport&, std::span<const V>, std::uint64_t, SparseTraffic&, Step);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
