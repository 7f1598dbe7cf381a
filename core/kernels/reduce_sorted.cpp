// Many sorted runs to one: by merging or, where they are many or dense, block by block of the index range, so that the
// scratch stays in the cache. Each input reduces its entries of the block into a dense scratch and marks them; then what
// is marked is packed.
//
// Marks are bytes, which are stored, not bits, which would be read and written back: of neighbours, each would wait for
// the one before.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "kernels/merge.hpp"
#include "kernels/merge_runs_avx512.hpp"
#include "kernels/operations.hpp"
#include "kernels/pack_avx512.hpp"

namespace telegrad::kernels {
namespace {

constexpr unsigned kBlockBits = 13;
constexpr std::uint32_t kBlock = 1U << kBlockBits;

template <class V>
struct Scratch {
  explicit Scratch(V neutral) { std::fill(results.begin(), results.end(), neutral); }

  Array<V> results{kBlock};
  alignas(64) std::array<std::uint8_t, kBlock> marks{};
};

// Reduces the leading entries that lie in `block` into the scratch; returns how many those are.
template <class Operation, class V>
std::size_t accumulate(Entries<V> entries, std::uint32_t block, Scratch<V>& scratch) {
  const std::uint32_t* const indices = entries.indices.data();
  const V* const values = entries.values.data();
  V* const results = scratch.results.data();
  std::uint8_t* const marks = scratch.marks.data();
  std::size_t i = 0;
  for (; i < entries.size() && indices[i] >> kBlockBits == block; ++i) {
    const std::uint32_t place = indices[i] & (kBlock - 1U);
    results[place] = Operation::of(results[place], values[i]);
    marks[place] = 1;
  }
  return i;
}

// Packs a block's elements that are marked, ascending, behind the first `count` entries of `out`; they become `neutral`
// and unmarked. Returns the new count. `others_follow`: at least as many as fill a vector register, from other blocks.
template <class V>
using PackBlock = std::size_t(Scratch<V>* scratch, std::uint32_t block, V neutral, EntriesOut<V> out, std::size_t count,
                              bool others_follow);

template <class V>
std::size_t pack_portable(Scratch<V>* scratch, std::uint32_t block, V neutral, EntriesOut<V> out, std::size_t count,
                          bool /*others_follow*/) {
  for (std::uint32_t first = 0; first < kBlock; first += sizeof(std::uint64_t)) {
    std::uint64_t marks = 0;
    std::memcpy(&marks, scratch->marks.data() + first, sizeof marks);
    if (marks == 0) continue;
    std::memset(scratch->marks.data() + first, 0, sizeof marks);
    TELEGRAD_CHECK(count + static_cast<std::size_t>(std::popcount(marks)) <= out.capacity());
    for (; marks != 0; marks &= marks - 1) {
      const std::uint32_t place = first + static_cast<std::uint32_t>(std::countr_zero(marks)) / 8;
      out.indices[count] = (block << kBlockBits) | place;
      out.values[count] = std::exchange(scratch->results[place], neutral);
      ++count;
    }
  }
  return count;
}

#ifdef TELEGRAD_KERNELS_X86

// All groups of 64 that have a mark: which of 16 have, would be a coin toss.
template <class V>
TELEGRAD_AVX512 std::size_t pack_avx512(Scratch<V>* scratch, std::uint32_t block, V neutral, EntriesOut<V> out,
                                        std::size_t count, bool others_follow) {
  constexpr std::uint32_t kWord = 64;
  for (std::uint32_t first = 0; first < kBlock; first += kWord) {
    std::uint8_t* const bytes = scratch->marks.data() + first;
    const __m512i all = _mm512_load_si512(bytes);
    const std::uint64_t marks = _mm512_test_epi8_mask(all, all);
    if (marks == 0) continue;
    _mm512_store_si512(bytes, _mm512_setzero_si512());
    const std::size_t more = static_cast<std::size_t>(__builtin_popcountll(marks)) + (others_follow ? kGroup : 0);
    TELEGRAD_CHECK(count + more <= out.capacity());
    V* const results = scratch->results.data() + first;
    for (std::uint32_t group = 0; group < kWord; group += kGroup) {
      const auto held = static_cast<std::uint32_t>(marks >> group) & 0xffffU;
      const std::uint32_t first_index = (block << kBlockBits) | (first + group);
      std::uint32_t* const indices = out.indices.data() + count;
      V* const values = out.values.data() + count;
      count += others_follow ? pack16_loosely(results + group, held, first_index, indices, values)
                             : pack16(results + group, held, first_index, indices, values);
    }
    std::fill_n(results, kWord, neutral);
  }
  return count;
}

template <class V>
constexpr Variants<PackBlock<V>> kPack{pack_portable<V>, nullptr, pack_avx512<V>};

#else

template <class V>
constexpr Variants<PackBlock<V>> kPack{pack_portable<V>};

#endif

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
  return on_operation(reduction, [&]<class Operation>(Operation) { return merge_runs<Operation>(inputs, out); });
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
  if (simd_level() != SimdLevel::avx512 || sizeof(V) > 4 || inputs.size() < 3) return false;
  const auto run_bits = static_cast<unsigned>(std::bit_width(inputs.size() - 1));
  return run_bits < 32 && all.first <= all.last && all.last - all.first < 0xffffffffU >> run_bits;
}

// Whether merging takes less time than blocks. Merging P equal inputs one after the other reads and writes
// (P² + P − 2)/2P entries for each of theirs. At once those go log2 P times through registers; but where more than two share
// an index, 256 are reduced one by one. Blocks take the less for an entry, the more of them share a group. Times in ns per
// entry, measured with benchmarks/core/sparse_kernels.cpp on an EPYC with AVX-512.
template <class V>
bool merging_is_faster(std::span<const Entries<V>> inputs, std::size_t total, Indices all, bool at_once) {
  if (all.first > all.last || (!at_once && inputs.size() <= 3)) return true;  // or nothing at all
  const auto count = static_cast<double>(inputs.size());
  const double density = static_cast<double>(total) / (static_cast<double>(all.last - all.first) + 1.0);
  const double blocks_ns = 1.3 + 2.2 / std::sqrt(density * 16.0);
  if (!at_once) return 2.6 * (count * count + count - 2.0) / (2.0 * count) < blocks_ns;
  const double crowded = 1.0 - std::exp(-32.0 * density * density);
  return 0.7 + 0.45 * std::ceil(std::log2(count)) + 3.0 * crowded < blocks_ns;
}

template <class Operation, class V>
std::size_t reduce_by_blocks(std::span<const Entries<V>> inputs, EntriesOut<V> out) {
  std::vector<Entries<V>> rest(inputs.begin(), inputs.end());
  constexpr V neutral = Operation::template kNeutral<V>;
  Scratch<V> scratch(neutral);
  std::size_t count = 0;
  for (;;) {
    const std::uint32_t block = lowest_block<V>(rest);
    if (block == std::numeric_limits<std::uint32_t>::max()) return count;
    for (Entries<V>& entries : rest) {
      const std::size_t taken = accumulate<Operation>(entries, block, scratch);
      entries = entries.subrun(taken, entries.size() - taken);
    }
    // Of one input, no two have the same index.
    const bool others_follow = std::ranges::any_of(rest, [](const auto& entries) { return entries.size() >= 16; });
    count = kPack<V>(&scratch, block, neutral, out, count, others_follow);
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
    if (merging_is_faster(inputs, total, all, at_once)) {
      return at_once ? kMerge<V>(reduction, inputs, out) : reduce_by_merging(reduction, inputs, out);
    }
  }
  return on_operation(reduction, [&]<class Operation>(Operation) { return reduce_by_blocks<Operation>(inputs, out); });
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
  template std::size_t reference::reduce_sorted(Reduction, std::span<const Entries<V>>, EntriesOut<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad::kernels
