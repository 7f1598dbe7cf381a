// Many sorted runs to one: by merging or, where they are many or dense, block by block of the index range (pack_block.hpp). Each
// input reduces its entries of the block and marks them; then what is marked is packed. A mark may say which inputs have made it.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "kernels/merge.hpp"
#include "kernels/merge_runs_avx512.hpp"
#include "kernels/operations.hpp"
#include "kernels/pack_block.hpp"

namespace telegrad::kernels {
namespace {

// Whether elements are made canonical when they are packed: a NaN stays one whatever is added, so that once is enough.
template <class Combine, class V>
inline constexpr bool kCanonicalLast = std::is_floating_point_v<V> && std::is_same_v<Combine, Sum>;

// Reduces the leading entries that lie in `block` into the scratch, and adds `mark` to their marks; returns how many those are.
template <class Combine, class V>
std::size_t accumulate(Entries<V> entries, std::uint32_t block, std::uint8_t mark, BlockScratch<V>& scratch) {
  constexpr std::size_t kAtOnce = 4;
  constexpr std::size_t kAhead = 512;  // entries, most of them of later blocks: by then they are in the cache
  const std::uint32_t* const indices = entries.indices.data();
  const V* const values = entries.values.data();
  V* const results = scratch.results.data();
  std::uint8_t* const marks = scratch.marks.data();
  const auto add = [&](std::size_t i) {
    const std::uint32_t place = indices[i] & (kBlock - 1U);
    if constexpr (kCanonicalLast<Combine, V>) {
      results[place] += values[i];
    } else {
      results[place] = Combine::of(results[place], values[i]);
    }
    marks[place] |= mark;
  };
  std::size_t i = 0;
  for (; i + kAtOnce <= entries.size() && indices[i + kAtOnce - 1] >> kBlockBits == block; i += kAtOnce) {
    __builtin_prefetch(indices + i + kAhead);
    __builtin_prefetch(values + i + kAhead);
    for (std::size_t k = 0; k < kAtOnce; ++k) add(i + k);
  }
  for (; i < entries.size() && indices[i] >> kBlockBits == block; ++i) add(i);
  return i;
}

// The lowest block in which an input still has an entry, or none.
template <class V>
std::uint32_t lowest_block(std::span<const Entries<V>> rest) {
  std::uint32_t lowest = std::numeric_limits<std::uint32_t>::max();
  for (const Entries<V>& entries : rest) {
    if (!entries.empty()) lowest = std::min(lowest, entries.indices.front() >> kBlockBits);
  }
  return lowest;
}

// One after the other, between two scratches; the last merge goes to `out`.
template <class V>
std::size_t reduce_by_merging(Reduction reduction, std::span<const Entries<V>> inputs, EntriesOut<V> out) {
  if (inputs.empty()) return 0;
  if (inputs.size() == 1) return merge(reduction, inputs[0], Entries<V>{}, out);
  std::array<Array<std::uint32_t>, 2> indices;
  std::array<Array<V>, 2> values;
  Entries<V> so_far = inputs[0];
  for (std::size_t next = 1; next + 1 < inputs.size(); ++next) {
    Array<std::uint32_t>& to_indices = indices[next % 2];
    Array<V>& to_values = values[next % 2];
    to_indices = Array<std::uint32_t>(so_far.size() + inputs[next].size());
    to_values = Array<V>(to_indices.size());
    const std::size_t count =
        merge(reduction, so_far, inputs[next], EntriesOut<V>{to_indices.span(), to_values.span()});
    so_far = {to_indices.span().first(count), to_values.span().first(count)};
  }
  return merge(reduction, so_far, inputs.back(), out);
}

// All of them at once, see merge_runs(); portably one after the other.
template <class V>
using MergeFunction = std::size_t(Reduction reduction, std::span<const Entries<V>> inputs, EntriesOut<V> out);

#ifdef TELEGRAD_KERNELS_X86

template <class V>
std::size_t merge_avx512(Reduction reduction, std::span<const Entries<V>> inputs, EntriesOut<V> out) {
  return on_operation(reduction, [&]<class Combine>(Combine) { return merge_runs<Combine>(inputs, out); });
}

#endif

template <class V>
constexpr Variants<MergeFunction<V>> variants_of_merging() {
#ifdef TELEGRAD_KERNELS_X86
  if constexpr (sizeof(V) <= 4) return {reduce_by_merging<V>, nullptr, merge_avx512<V>};
#endif
  return {reduce_by_merging<V>};
}
template <class V>
constexpr Variants<MergeFunction<V>> kMerge = variants_of_merging<V>();

struct Indices {
  std::uint32_t first = std::numeric_limits<std::uint32_t>::max();
  std::uint32_t last = 0;
};
template <class V>
Indices indices_of(std::span<const Entries<V>> inputs) {
  Indices all;
  for (const Entries<V>& entries : inputs) {
    if (entries.empty()) continue;
    all.first = std::min(all.first, entries.indices.front());
    all.last = std::max(all.last, entries.indices.back());
  }
  return all;
}

template <class V>
bool merges_all_at_once(std::span<const Entries<V>> inputs, Indices all) {
  if (simd_level() < SimdLevel::avx512 || sizeof(V) > 4 || inputs.size() < 3) return false;
  const auto run_bits = static_cast<unsigned>(std::bit_width(inputs.size() - 1));
  return run_bits < 32 && all.first <= all.last && all.last - all.first < 0xffffffffU >> run_bits;
}

// What reducing takes for an entry, in ns, measured with benchmarks/core/sparse_kernels.cpp on EPYCs with AVX-512 and, below that,
// on one with AVX2. Merging P equal inputs one after the other reads and writes (P² + P − 2)/2P entries for each of theirs. At once those
// go log2 P times through registers; but where more than two share an index, 256 are reduced one by one. Blocks take the less, the
// more entries share a group of 16. `density`: entries of all inputs together for an index.
template <class V>
double merging_ns(std::size_t inputs, double density, bool at_once) {
  const auto count = static_cast<double>(inputs);
  const bool avx2 = simd_level() == SimdLevel::avx2 && sizeof(V) <= 4;
  const double merge_ns = avx2 ? 1.8 : simd_level() < SimdLevel::avx512 ? 3.6 : sizeof(V) <= 4 ? 1.4 : 2.6;
  if (!at_once) return merge_ns * (count * count + count - 2.0) / (2.0 * count);
  const double crowded = 1.0 - std::exp(-32.0 * density * density);
  return 0.9 + 0.5 * std::ceil(std::log2(count)) + 3.0 * crowded;
}
template <class V>
double blocks_ns(Reduction reduction, double density) {
  const double group = std::max(density * 16.0, 1e-6);
  const bool orders = reduction == Reduction::min || reduction == Reduction::max;
  // Merging reduces many at a time.
  const double one_by_one = orders ? 4.0 : std::is_same_v<V, f16> ? 3.0 : std::is_same_v<V, bf16> ? 0.5 : 0.0;
  switch (simd_level()) {
    case SimdLevel::portable: return one_by_one + 1.0 + 7.5 / std::sqrt(group);
    case SimdLevel::avx2: return one_by_one + 0.7 + 4.0 / std::sqrt(group);
    case SimdLevel::avx512: return one_by_one + 1.3 + 2.2 / std::sqrt(group);
    case SimdLevel::avx512_vbmi2: break;
  }
  return one_by_one + 0.6 + 1.1 / std::pow(group, 0.75);
}
constexpr double kScratch_ns = 3000.0;     // to fill a scratch and look at all of it once
constexpr double kFindingGiven_ns = 0.6;  // of one input, in vain looked for where givers are known

template <class V>
bool merging_is_faster(Reduction reduction, std::span<const Entries<V>> inputs, std::size_t total, Indices all, bool at_once) {
  if (all.first > all.last) return true;  // nothing at all
  const double density = static_cast<double>(total) / (static_cast<double>(all.last - all.first) + 1.0);
  const double scratch_ns = kScratch_ns / static_cast<double>(total);
  return merging_ns<V>(inputs.size(), density, at_once) < blocks_ns<V>(reduction, density) + scratch_ns;
}

// `givers`: which inputs have each of the indices, if they are wanted.
template <class Combine, class V>
std::size_t reduce_by_blocks(std::span<const Entries<V>> inputs, EntriesOut<V> out, std::uint8_t* givers) {
  std::vector<Entries<V>> rest(inputs.begin(), inputs.end());
  constexpr V neutral = Combine::template kNeutral<V>;
  BlockScratch<V> scratch(neutral);
  PackedBlocks<V> to{out, givers};
  for (;;) {
    const std::uint32_t block = lowest_block<V>(rest);
    if (block == std::numeric_limits<std::uint32_t>::max()) return to.count;
    for (std::size_t input = 0; input < rest.size(); ++input) {
      const auto mark = static_cast<std::uint8_t>(1U << (givers != nullptr ? input : 0));
      Entries<V>& entries = rest[input];
      const std::size_t taken = accumulate<Combine>(entries, block, mark, scratch);
      entries = entries.subrun(taken, entries.size() - taken);
    }
    // Of one input, no two have the same index.
    const bool others_follow = std::ranges::any_of(rest, [](const auto& entries) { return entries.size() >= 16; });
    const std::size_t packed = to.count;
    pack_block(scratch, block, neutral, to, others_follow);
    if constexpr (kCanonicalLast<Combine, V>) {
      for (V& value : to.out.values.subspan(packed, to.count - packed)) value = canonical(value);
    }
  }
}

}  // namespace

template <class V>
std::size_t reduce_sorted(Reduction reduction, std::span<const Entries<V>> inputs, EntriesOut<V> out) {
  TELEGRAD_CHECK(out.indices.size() == out.values.size());
  std::size_t total = 0;
  for (const Entries<V>& entries : inputs) total += entries.size();
  if (total <= out.capacity()) {
    const Indices all = indices_of(inputs);
    const bool at_once = merges_all_at_once(inputs, all);
    if (merging_is_faster(reduction, inputs, total, all, at_once)) {
      return at_once ? kMerge<V>(reduction, inputs, out) : reduce_by_merging(reduction, inputs, out);
    }
  }
  return on_operation(reduction,
                      [&]<class Combine>(Combine) { return reduce_by_blocks<Combine>(inputs, out, nullptr); });
}

template <class V>
std::size_t reduce_sorted_of(Reduction reduction, std::span<const Entries<V>> inputs, EntriesOut<V> out,
                             std::span<std::uint8_t> givers) {
  TELEGRAD_CHECK(out.indices.size() == out.values.size() && givers.size() >= out.capacity() && inputs.size() <= kGiversMost);
  return on_operation(reduction,
                      [&]<class Combine>(Combine) { return reduce_by_blocks<Combine>(inputs, out, givers.data()); });
}

template <class V>
bool givers_pay(Reduction reduction, std::size_t inputs, std::size_t total, std::uint64_t range) {
  if (inputs < 2 || inputs > kGiversMost || total == 0) return false;
  const double density = static_cast<double>(total) / static_cast<double>(range);
  const bool at_once = inputs > 2 && simd_level() >= SimdLevel::avx512 && sizeof(V) <= 4;
  const double otherwise_ns = merging_ns<V>(inputs, density, at_once) + kFindingGiven_ns * static_cast<double>(inputs - 1);
  return blocks_ns<V>(reduction, density) + kScratch_ns / static_cast<double>(total) < otherwise_ns;
}

namespace reference {

template <class V>
std::size_t reduce_sorted(Reduction reduction, std::span<const Entries<V>> inputs, EntriesOut<V> out) {
  std::size_t total = 0;
  for (const Entries<V>& entries : inputs) total += entries.size();
  Array<std::uint32_t> indices(total);
  Array<V> values(total);
  std::size_t count = 0;
  for (const Entries<V>& entries : inputs) {
    const Entries<V> so_far{indices.span().first(count), values.span().first(count)};
    Array<std::uint32_t> merged_indices(total);
    Array<V> merged_values(total);
    count = reference::merge(reduction, so_far, entries,
                             EntriesOut<V>{merged_indices.span(), merged_values.span()});
    indices = std::move(merged_indices);
    values = std::move(merged_values);
  }
  std::copy_n(indices.begin(), count, out.indices.begin());
  std::copy_n(values.begin(), count, out.values.begin());
  return count;
}

}  // namespace reference

#define TELEGRAD_INSTANTIATE(V)                                                                \
  template std::size_t reduce_sorted(Reduction, std::span<const Entries<V>>, EntriesOut<V>);   \
  template std::size_t reduce_sorted_of(Reduction, std::span<const Entries<V>>, EntriesOut<V>, std::span<std::uint8_t>); \
  template bool givers_pay<V>(Reduction, std::size_t, std::size_t, std::uint64_t);             \
  template std::size_t reference::reduce_sorted(Reduction, std::span<const Entries<V>>, EntriesOut<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad::kernels
