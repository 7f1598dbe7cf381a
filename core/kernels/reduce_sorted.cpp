// Many sorted runs to one: by merging or, where they are many or dense, block by block of the index range, so that the
// scratch stays in the cache. Each input reduces its entries of the block into a dense scratch and marks their groups;
// then the groups are packed.
//
// An element of the scratch that nobody has named holds a NaN that is not the canonical one: no reduction makes such a
// NaN, so no bit beside the element need say that it is empty. Marks are bytes, which are stored, not bits, which would
// be read and written back: of neighbours, each would wait for the one before.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "kernels/merge.hpp"
#include "kernels/operations.hpp"
#include "kernels/pack_avx512.hpp"

namespace telegrad::kernels {
namespace {

constexpr unsigned kBlockBits = 14;
constexpr std::uint32_t kBlock = 1U << kBlockBits;
constexpr unsigned kGroupBits = 4;
constexpr std::uint32_t kGroups = kBlock >> kGroupBits;
constexpr std::uint32_t kMarksAtOnce = 8;

template <class V>
using Bits = typename Format<V>::Bits;

template <class V>
constexpr Bits<V> kEmpty = static_cast<Bits<V>>(-1);
static_assert(kEmpty<float> != Format<float>::kNan);

template <class V>
struct Scratch {
  Array<V> results{kBlock};
  alignas(64) std::array<std::uint8_t, kGroups> marks{};

  Scratch() { std::fill(results.begin(), results.end(), std::bit_cast<V>(kEmpty<V>)); }
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
    const auto held = std::bit_cast<Bits<V>>(results[place]);
    const Bits<V> empty = static_cast<Bits<V>>(-static_cast<Bits<V>>(held == kEmpty<V>));  // no branch: a coin toss
    constexpr auto kNeutral = std::bit_cast<Bits<V>>(Operation::template kNeutral<V>);
    const auto before = static_cast<Bits<V>>((held & ~empty) | (kNeutral & empty));
    results[place] = Operation::of(std::bit_cast<V>(before), values[i]);
    marks[place >> kGroupBits] = 1;
  }
  return i;
}

// The marks of kMarksAtOnce groups, a byte each, which are forgotten.
template <class V>
[[gnu::always_inline]] inline std::uint64_t take_marks(Scratch<V>& scratch, std::uint32_t first) {
  std::uint64_t marks = 0;
  std::memcpy(&marks, scratch.marks.data() + first, sizeof marks);
  if (marks != 0) std::memset(scratch.marks.data() + first, 0, sizeof marks);
  return marks;
}

// A bit for each element of a group that is not empty.
template <class V>
std::uint32_t held_in(const V* group) {
  std::uint32_t marks = 0;
  for (std::uint32_t i = 0; i < 1U << kGroupBits; ++i) {
    marks |= (std::bit_cast<Bits<V>>(group[i]) != kEmpty<V> ? 1U : 0U) << i;
  }
  return marks;
}

template <class V>
std::size_t pack_group(V* group, std::uint32_t first_index, EntriesOut<V> out, std::size_t count) {
  std::uint32_t marks = held_in(group);
  TELEGRAD_CHECK(count + static_cast<std::size_t>(std::popcount(marks)) <= out.capacity());
  for (; marks != 0; marks &= marks - 1) {
    const auto i = static_cast<std::uint32_t>(std::countr_zero(marks));
    out.indices[count] = first_index + i;
    out.values[count] = group[i];
    group[i] = std::bit_cast<V>(kEmpty<V>);
    ++count;
  }
  return count;
}

// Packs a block's elements that are not empty, ascending, behind the first `count` entries of `out`, and empties them.
// Returns the new count.
template <class V>
using PackBlock = std::size_t(Scratch<V>* scratch, std::uint32_t block, EntriesOut<V> out, std::size_t count);

template <class V>
std::size_t pack_portable(Scratch<V>* scratch, std::uint32_t block, EntriesOut<V> out, std::size_t count) {
  for (std::uint32_t first = 0; first < kGroups; first += kMarksAtOnce) {
    for (std::uint64_t marks = take_marks(*scratch, first); marks != 0; marks &= marks - 1) {
      const std::uint32_t place = (first + static_cast<std::uint32_t>(std::countr_zero(marks)) / 8) << kGroupBits;
      count = pack_group(scratch->results.data() + place, (block << kBlockBits) | place, out, count);
    }
  }
  return count;
}

#ifdef TELEGRAD_KERNELS_X86

// First a list of the marked groups, then those, so that no branch depends on what is marked.
template <class V>
TELEGRAD_AVX512 std::size_t pack_avx512(Scratch<V>* scratch, std::uint32_t block, EntriesOut<V> out,
                                        std::size_t count) {
  static_assert(kGroup == 1U << kGroupBits);
  alignas(64) std::array<std::uint32_t, kGroups + kGroup> marked;
  std::array<std::uint32_t, kGroups> begins;
  std::array<std::uint16_t, kGroups> held;
  std::size_t groups = 0;
  const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (std::uint32_t first = 0; first < kGroups; first += kGroup) {
    auto* const marks = reinterpret_cast<__m128i*>(scratch->marks.data() + first);
    const __m128i all = _mm_load_si128(marks);
    const __mmask16 set = _mm_test_epi8_mask(all, all);
    _mm_store_si128(marks, _mm_setzero_si128());
    const __m512i numbers = _mm512_add_epi32(places, _mm512_set1_epi32(static_cast<int>(first)));
    _mm512_storeu_si512(marked.data() + groups, _mm512_maskz_compress_epi32(set, numbers));
    groups += static_cast<std::size_t>(__builtin_popcount(set));
  }
  for (std::size_t i = 0; i < groups; ++i) {
    held[i] = static_cast<std::uint16_t>(
        differing16(scratch->results.data() + (marked[i] << kGroupBits), kEmpty<V>, kEmpty<V>));
    begins[i] = static_cast<std::uint32_t>(count);
    count += static_cast<std::size_t>(__builtin_popcount(held[i]));
  }
  TELEGRAD_CHECK(count <= out.capacity());
  for (std::size_t i = 0; i < groups; ++i) {
    const std::uint32_t place = marked[i] << kGroupBits;
    V* const group = scratch->results.data() + place;
    pack16(group, held[i], (block << kBlockBits) | place, out.indices.data() + begins[i],
           out.values.data() + begins[i]);
    std::fill_n(group, kGroup, std::bit_cast<V>(kEmpty<V>));
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

// Whether merging takes less time than blocks. Merging P equal inputs reads and writes (P² + P − 2)/2P entries for each
// of theirs; blocks take the less for an entry, the more of them share a group. Times in ns per entry, measured with
// benchmarks/core/sparse_kernels.cpp on an EPYC with AVX-512 (1.3 and 2.6: f32 merged with and without it).
template <class V>
bool merging_is_faster(std::span<const Entries<V>> inputs, std::size_t total) {
  if (inputs.size() <= 3) return true;
  std::uint32_t first = std::numeric_limits<std::uint32_t>::max();
  std::uint32_t last = 0;
  for (const Entries<V>& entries : inputs) {
    if (entries.empty()) continue;
    first = std::min(first, entries.indices.front());
    last = std::max(last, entries.indices.back());
  }
  if (first > last) return true;  // nothing at all
  const auto count = static_cast<double>(inputs.size());
  const double merge_ns = simd_level() == SimdLevel::avx512 && sizeof(V) <= 4 ? 1.3 : 2.6;
  const double in_a_group = static_cast<double>(total) / (static_cast<double>(last - first) + 1.0) * (1U << kGroupBits);
  const double blocks_ns = 1.9 + 3.2 / std::sqrt(in_a_group);
  return merge_ns * (count * count + count - 2.0) / (2.0 * count) < blocks_ns;
}

template <class Operation, class V>
std::size_t reduce_by_blocks(std::span<const Entries<V>> inputs, EntriesOut<V> out) {
  std::vector<Entries<V>> rest(inputs.begin(), inputs.end());
  Scratch<V> scratch;
  std::size_t count = 0;
  for (;;) {
    const std::uint32_t block = lowest_block<V>(rest);
    if (block == std::numeric_limits<std::uint32_t>::max()) return count;
    for (Entries<V>& entries : rest) {
      const std::size_t taken = accumulate<Operation>(entries, block, scratch);
      entries = entries.subrun(taken, entries.size() - taken);
    }
    count = kPack<V>(&scratch, block, out, count);
  }
}

}  // namespace

template <class V>
std::size_t reduce_sorted(Reduction reduction, std::span<const Entries<V>> inputs, EntriesOut<V> out) {
  TELEGRAD_CHECK(out.indices.size() == out.values.size());
  std::size_t total = 0;
  for (const Entries<V>& entries : inputs) total += entries.size();
  if (total <= out.capacity() && merging_is_faster(inputs, total)) return reduce_by_merging(reduction, inputs, out);
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
