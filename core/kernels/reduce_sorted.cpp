// Many sorted runs to one: by merging or, where they are many or dense, block by block of the index range, so that the
// scratch stays in the cache. Each input reduces its entries of the block into a dense scratch and marks them; then what
// is marked is packed. A mark may say which inputs have made it.
//
// Marks are bytes, which are stored, not bits, which would be read and written back: of neighbours, each would wait for
// the one before.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "kernels/merge.hpp"
#include "kernels/merge_runs_avx512.hpp"
#include "kernels/operations.hpp"
#include "kernels/pack_avx2.hpp"
#include "kernels/pack_avx512.hpp"

namespace telegrad::kernels {
namespace {

constexpr unsigned kBlockBits = 13;
constexpr std::uint32_t kBlock = 1U << kBlockBits;
constexpr std::uint32_t kBehind = 64;

template <class V>
struct Scratch {
  explicit Scratch(V neutral) { std::fill(results.begin(), results.end(), neutral); }

  // Behind the block is room for what is read ahead of it.
  Array<V> results{kBlock + kBehind};
  alignas(64) std::array<std::uint8_t, kBlock + kBehind> marks{};
};

// Reduces the leading entries that lie in `block` into the scratch, and adds `mark` to their marks; returns how many those are.
template <class Operation, class V>
std::size_t accumulate(Entries<V> entries, std::uint32_t block, std::uint8_t mark, Scratch<V>& scratch) {
  constexpr std::size_t kAtOnce = 4;
  const std::uint32_t* const indices = entries.indices.data();
  const V* const values = entries.values.data();
  V* const results = scratch.results.data();
  std::uint8_t* const marks = scratch.marks.data();
  const auto add = [&](std::size_t i) {
    const std::uint32_t place = indices[i] & (kBlock - 1U);
    results[place] = Operation::of(results[place], values[i]);
    marks[place] |= mark;
  };
  std::size_t i = 0;
  for (; i + kAtOnce <= entries.size() && indices[i + kAtOnce - 1] >> kBlockBits == block; i += kAtOnce) {
    for (std::size_t k = 0; k < kAtOnce; ++k) add(i + k);
  }
  for (; i < entries.size() && indices[i] >> kBlockBits == block; ++i) add(i);
  return i;
}

// Where a block's entries go: behind the first `count` ones.
template <class V>
struct Packed {
  EntriesOut<V> out;
  std::uint8_t* marks;  // of each entry, if they are wanted
  std::size_t count = 0;
};

// Packs a block's elements that are marked, ascending; they become `neutral` and unmarked. `others_follow`: at least as many as
// fill a vector register, from other blocks.
template <class V>
using PackBlock = void(Scratch<V>* scratch, std::uint32_t block, V neutral, Packed<V>* to, bool others_follow);

template <class V>
void pack_portable(Scratch<V>* scratch, std::uint32_t block, V neutral, Packed<V>* to, bool /*others_follow*/) {
  for (std::uint32_t first = 0; first < kBlock; first += sizeof(std::uint64_t)) {
    std::uint64_t marks = 0;
    std::memcpy(&marks, scratch->marks.data() + first, sizeof marks);
    if (marks == 0) continue;
    std::memset(scratch->marks.data() + first, 0, sizeof marks);
    for (std::uint32_t place = first; marks != 0; ++place, marks >>= 8) {
      if ((marks & 0xffU) == 0) continue;
      TELEGRAD_CHECK(to->count < to->out.capacity());
      to->out.indices[to->count] = (block << kBlockBits) | place;
      to->out.values[to->count] = std::exchange(scratch->results[place], neutral);
      if (to->marks != nullptr) to->marks[to->count] = static_cast<std::uint8_t>(marks);
      ++to->count;
    }
  }
}

#ifdef TELEGRAD_KERNELS_X86

constexpr std::uint32_t kWord = 64;

template <class V>
void check_room(const Packed<V>& to, std::uint64_t marks, bool others_follow) {
  const std::size_t more = static_cast<std::size_t>(__builtin_popcountll(marks)) + (others_follow ? kGroup : 0);
  TELEGRAD_CHECK(to.count + more <= to.out.capacity());
}

// Those groups of 64 that have a mark, as a list: as branches, which have one would cost more than all else where few have.
using HeldWords = std::array<std::uint8_t, kBlock / kWord + 1>;
static_assert(kBlock / kWord <= 256);

TELEGRAD_AVX2 inline std::uint64_t marked_avx2(const std::uint8_t* marks) {
  const __m256i none = _mm256_setzero_si256();
  const auto lower = static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(load8(marks), none)));
  const auto upper = static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(load8(marks + kWord / 2), none)));
  return ~(lower | std::uint64_t{upper} << 32);
}

template <class V>
TELEGRAD_AVX2 std::size_t list_words_avx2(const Scratch<V>& scratch, HeldWords& held) {
  std::size_t count = 0;
  for (std::uint32_t word = 0; word < kBlock / kWord; ++word) {
    const std::uint8_t* const bytes = scratch.marks.data() + word * kWord;
    const __m256i any = _mm256_or_si256(load8(bytes), load8(bytes + kWord / 2));
    held[count] = static_cast<std::uint8_t>(word);
    count += _mm256_testz_si256(any, any) == 0 ? 1 : 0;
  }
  return count;
}

template <class V>
TELEGRAD_AVX2 inline void clear_word_avx2(std::uint8_t* marks, V* results, V neutral) {
  store8(marks, _mm256_setzero_si256());
  store8(marks + kWord / 2, _mm256_setzero_si256());
  const auto bits = std::bit_cast<typename Format<V>::Bits>(neutral);
  const __m256i all = sizeof(V) == 8   ? _mm256_set1_epi64x(static_cast<std::int64_t>(bits))
                      : sizeof(V) == 4 ? _mm256_set1_epi32(static_cast<std::int32_t>(bits))
                                       : _mm256_set1_epi16(static_cast<std::int16_t>(bits));
  for (std::size_t byte = 0; byte < kWord * sizeof(V); byte += 32) store8(reinterpret_cast<std::byte*>(results) + byte, all);
}

// 64 elements, of which those in `marks` are to be packed, with room for eight entries behind them. How many those are, nobody foresees:
// so one by one, but always in eights.
template <bool kGivers, class V>
TELEGRAD_AVX2 inline void pack_singly(const V* results, const std::uint8_t* bytes, std::uint64_t marks, std::uint32_t first_index,
                                      std::uint32_t* indices, V* values, std::uint8_t* givers) {
  const auto count = static_cast<std::size_t>(std::popcount(marks));
  for (std::size_t done = 0; done < count; done += 8) {
    for (std::size_t i = done; i < done + 8; ++i, marks &= marks - 1) {
      const auto place = static_cast<std::uint32_t>(_tzcnt_u64(marks));  // 64 behind the last one
      indices[i] = first_index + place;
      values[i] = results[place];
      if constexpr (kGivers) givers[i] = bytes[place];
    }
  }
}

// The same in less time where they are many: eight elements at a time, whatever is marked of them.
template <bool kGivers>
TELEGRAD_AVX2 inline void pack_by_eights(const float* results, const std::uint8_t* bytes, std::uint64_t marks, std::uint32_t first_index,
                                         std::uint32_t* indices, float* values, std::uint8_t* givers) {
  std::size_t count = 0;
  for (std::uint32_t first = 0; first < kWord; first += 8) {
    const auto held = static_cast<std::uint32_t>(marks >> first) & 0xffU;
    const __m128i places = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kByteBits.places[held]));
    const __m256i lanes = _mm256_cvtepu8_epi32(places);
    store8(values + count, _mm256_permutevar8x32_epi32(load8(results + first), lanes));
    store8(indices + count, _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(first_index + first))));
    if constexpr (kGivers) {
      const __m128i gave = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + first));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(givers + count), _mm_shuffle_epi8(gave, places));
    }
    count += static_cast<std::size_t>(std::popcount(held));
  }
}

template <bool kGivers, class V>
TELEGRAD_AVX2 void pack_words_avx2(Scratch<V>* scratch, std::uint32_t block, V neutral, Packed<V>* packed) {
  constexpr std::size_t kMany = 12;  // of 64, where eights of them take less time
  Packed<V> to = *packed;
  HeldWords held;
  const std::size_t words = list_words_avx2(*scratch, held);
  for (std::size_t i = 0; i < words; ++i) {
    const std::uint32_t first = held[i] * kWord;
    std::uint8_t* const bytes = scratch->marks.data() + first;
    V* const results = scratch->results.data() + first;
    const std::uint64_t marks = marked_avx2(bytes);
    check_room(to, marks, true);
    const auto count = static_cast<std::size_t>(std::popcount(marks));
    const std::uint32_t first_index = block << kBlockBits | first;
    std::uint32_t* const indices = to.out.indices.data() + to.count;
    V* const values = to.out.values.data() + to.count;
    std::uint8_t* const givers = kGivers ? to.marks + to.count : nullptr;
    bool packed_already = false;
    if constexpr (std::is_same_v<V, float>) {
      packed_already = count >= kMany;
      if (packed_already) pack_by_eights<kGivers>(results, bytes, marks, first_index, indices, values, givers);
    }
    if (!packed_already) pack_singly<kGivers>(results, bytes, marks, first_index, indices, values, givers);
    to.count += count;
    clear_word_avx2(bytes, results, neutral);
  }
  packed->count = to.count;
}

template <class V>
void pack_avx2(Scratch<V>* scratch, std::uint32_t block, V neutral, Packed<V>* to, bool others_follow) {
  if (!others_follow) return pack_portable(scratch, block, neutral, to, others_follow);
  to->marks != nullptr ? pack_words_avx2<true>(scratch, block, neutral, to)
                       : pack_words_avx2<false>(scratch, block, neutral, to);
}

// 64 elements again what they are where nobody has an entry; as a loop, GCC stores 16-bit floats one by one.
template <class V>
TELEGRAD_AVX512 inline void clear_word(V* results, V neutral) {
  const auto bits = std::bit_cast<typename Format<V>::Bits>(neutral);
  const __m512i all = sizeof(V) == 8   ? _mm512_set1_epi64(static_cast<std::int64_t>(bits))
                      : sizeof(V) == 4 ? _mm512_set1_epi32(static_cast<std::int32_t>(bits))
                                       : _mm512_set1_epi16(static_cast<std::int16_t>(bits));
  for (std::size_t byte = 0; byte < kWord * sizeof(V); byte += 64) {
    _mm512_store_si512(reinterpret_cast<std::byte*>(results) + byte, all);
  }
}

// All groups of 64 that have a mark: which of 16 have, would be a coin toss.
template <class V>
TELEGRAD_AVX512 void pack_avx512(Scratch<V>* scratch, std::uint32_t block, V neutral, Packed<V>* to, bool others_follow) {
  for (std::uint32_t first = 0; first < kBlock; first += kWord) {
    std::uint8_t* const bytes = scratch->marks.data() + first;
    const __m512i all = _mm512_load_si512(bytes);
    const std::uint64_t marks = _mm512_test_epi8_mask(all, all);
    if (marks == 0) continue;
    check_room(*to, marks, others_follow);
    if (to->marks != nullptr) {
      std::uint8_t* at = to->marks + to->count;
      for (std::uint64_t left = marks; left != 0; left &= left - 1) *at++ = bytes[_tzcnt_u64(left)];
    }
    _mm512_store_si512(bytes, _mm512_setzero_si512());
    V* const results = scratch->results.data() + first;
    for (std::uint32_t group = 0; group < kWord; group += kGroup) {
      const auto held = static_cast<std::uint32_t>(marks >> group) & 0xffffU;
      const std::uint32_t first_index = (block << kBlockBits) | (first + group);
      std::uint32_t* const indices = to->out.indices.data() + to->count;
      V* const values = to->out.values.data() + to->count;
      to->count += others_follow ? pack16_loosely(results + group, held, first_index, indices, values)
                                 : pack16(results + group, held, first_index, indices, values);
    }
    clear_word(results, neutral);
  }
}

// Of 64 results the 16 at these places. Loosely: all are written, also those behind `count`.
template <bool kLoosely, class V>
TELEGRAD_AVX512_VBMI2 inline void take16(const V* results, __m512i places, std::size_t count, V* to) {
  constexpr __mmask16 kAll = 0xffff;
  const auto written = static_cast<__mmask16>((1U << count) - 1U);
  if constexpr (sizeof(V) == 4) {
    const __m512i low = _mm512_permutex2var_epi32(_mm512_load_si512(results), places, _mm512_load_si512(results + 16));
    const __m512i high = _mm512_permutex2var_epi32(_mm512_load_si512(results + 32), places, _mm512_load_si512(results + 48));
    const __mmask16 is_high = _mm512_test_epi32_mask(places, _mm512_set1_epi32(32));
    const __m512i taken = _mm512_mask_mov_epi32(low, is_high, high);
    if constexpr (kLoosely) {
      _mm512_storeu_si512(to, taken);
    } else {
      _mm512_mask_storeu_epi32(to, written, taken);
    }
  } else if constexpr (sizeof(V) == 2) {
    const __m512i words = _mm512_zextsi256_si512(_mm512_maskz_cvtepi32_epi16(kAll, places));
    const __m512i both = _mm512_permutex2var_epi16(_mm512_load_si512(results), words, _mm512_load_si512(results + 32));
    const __m256i taken = _mm512_castsi512_si256(both);
    if constexpr (kLoosely) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), taken);
    } else {
      _mm256_mask_storeu_epi16(to, written, taken);
    }
  } else {
    const __m256i halves[] = {_mm512_castsi512_si256(places), _mm512_extracti64x4_epi64(places, 1)};
    for (int half = 0; half < 2; ++half) {
      const __m512i taken = _mm512_mask_i32gather_epi64(_mm512_setzero_si512(), 0xff, halves[half], results, 8);
      if constexpr (kLoosely) {
        _mm512_storeu_si512(to + 8 * half, taken);
      } else {
        _mm512_mask_storeu_epi64(to + 8 * half, static_cast<__mmask8>(written >> 8 * half), taken);
      }
    }
  }
}

template <class V>
TELEGRAD_AVX512_VBMI2 std::size_t list_words(const Scratch<V>& scratch, HeldWords& held) {
  std::size_t count = 0;
  for (std::uint32_t word = 0; word < kBlock / kWord; ++word) {
    const __m512i all = _mm512_load_si512(scratch.marks.data() + word * kWord);
    held[count] = static_cast<std::uint8_t>(word);
    count += _mm512_test_epi8_mask(all, all) != 0 ? 1 : 0;
  }
  return count;
}

template <bool kLoosely, class V>
TELEGRAD_AVX512_VBMI2 void pack_words(Scratch<V>* scratch, std::uint32_t block, V neutral, Packed<V>* packed) {
  constexpr __mmask16 kAll = 0xffff;
  Packed<V> to = *packed;
  HeldWords held;
  const std::size_t words = list_words(*scratch, held);
  alignas(kWord) std::array<std::uint8_t, kWord> counting;
  for (std::uint32_t i = 0; i < kWord; ++i) counting[i] = static_cast<std::uint8_t>(i);
  const __m512i all_places = _mm512_load_si512(counting.data());
  for (std::size_t i = 0; i < words; ++i) {
    const std::uint32_t first = held[i] * kWord;
    std::uint8_t* const bytes = scratch->marks.data() + first;
    V* const results = scratch->results.data() + first;
    __m512i marked = _mm512_load_si512(bytes);
    const std::uint64_t marks = _mm512_test_epi8_mask(marked, marked);
    check_room(to, marks, kLoosely);
    __m512i places = _mm512_maskz_compress_epi8(marks, all_places);
    marked = _mm512_maskz_compress_epi8(marks, marked);
    const __m512i first_index = _mm512_set1_epi32(static_cast<int>(block << kBlockBits | first));
    for (auto left = static_cast<std::size_t>(__builtin_popcountll(marks)); left > 0;) {
      const std::size_t here = std::min<std::size_t>(kGroup, left);
      const __m512i wide = _mm512_maskz_cvtepu8_epi32(kAll, _mm512_castsi512_si128(places));
      const __m512i indices = _mm512_add_epi32(wide, first_index);
      take16<kLoosely>(results, wide, here, to.out.values.data() + to.count);
      if constexpr (kLoosely) {
        _mm512_storeu_si512(to.out.indices.data() + to.count, indices);
        if (to.marks != nullptr) {
          _mm_storeu_si128(reinterpret_cast<__m128i*>(to.marks + to.count), _mm512_castsi512_si128(marked));
        }
      } else {
        const auto written = static_cast<__mmask16>((1U << here) - 1U);
        _mm512_mask_storeu_epi32(to.out.indices.data() + to.count, written, indices);
        if (to.marks != nullptr) _mm_mask_storeu_epi8(to.marks + to.count, written, _mm512_castsi512_si128(marked));
      }
      to.count += here;
      left -= here;
      places = _mm512_maskz_alignr_epi64(0xff, _mm512_setzero_si512(), places, 2);
      marked = _mm512_maskz_alignr_epi64(0xff, _mm512_setzero_si512(), marked, 2);
    }
    _mm512_store_si512(bytes, _mm512_setzero_si512());
    clear_word(results, neutral);
  }
  packed->count = to.count;
}

template <class V>
void pack_vbmi2(Scratch<V>* scratch, std::uint32_t block, V neutral, Packed<V>* to, bool others_follow) {
  others_follow ? pack_words<true>(scratch, block, neutral, to) : pack_words<false>(scratch, block, neutral, to);
}

template <class V>
constexpr Variants<PackBlock<V>> kPack{pack_portable<V>, pack_avx2<V>, pack_avx512<V>, pack_vbmi2<V>};

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
  const double merge_ns = avx2 ? 2.0 : simd_level() < SimdLevel::avx512 ? 3.6 : 2.6;
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
    case SimdLevel::portable: return one_by_one + 20.0 / std::sqrt(group);
    case SimdLevel::avx2: return one_by_one + 0.7 + 4.0 / std::sqrt(group);
    case SimdLevel::avx512: return one_by_one + 1.3 + 2.2 / std::sqrt(group);
    case SimdLevel::avx512_vbmi2: break;
  }
  return one_by_one + 0.6 + 1.1 / std::pow(group, 0.75);
}
constexpr double kFindingGiven_ns = 0.6;  // of one input, in vain looked for where givers are known

template <class V>
bool merging_is_faster(Reduction reduction, std::span<const Entries<V>> inputs, std::size_t total, Indices all, bool at_once) {
  if (all.first > all.last) return true;  // nothing at all
  const double density = static_cast<double>(total) / (static_cast<double>(all.last - all.first) + 1.0);
  return merging_ns<V>(inputs.size(), density, at_once) < blocks_ns<V>(reduction, density);
}

// `givers`: which inputs have each of the indices, if they are wanted.
template <class Operation, class V>
std::size_t reduce_by_blocks(std::span<const Entries<V>> inputs, EntriesOut<V> out, std::uint8_t* givers) {
  std::vector<Entries<V>> rest(inputs.begin(), inputs.end());
  constexpr V neutral = Operation::template kNeutral<V>;
  Scratch<V> scratch(neutral);
  Packed<V> to{out, givers};
  for (;;) {
    const std::uint32_t block = lowest_block<V>(rest);
    if (block == std::numeric_limits<std::uint32_t>::max()) return to.count;
    for (std::size_t input = 0; input < rest.size(); ++input) {
      const auto mark = static_cast<std::uint8_t>(1U << (givers != nullptr ? input : 0));
      Entries<V>& entries = rest[input];
      const std::size_t taken = accumulate<Operation>(entries, block, mark, scratch);
      entries = entries.subrun(taken, entries.size() - taken);
    }
    // Of one input, no two have the same index.
    const bool others_follow = std::ranges::any_of(rest, [](const auto& entries) { return entries.size() >= 16; });
    kPack<V>(&scratch, block, neutral, &to, others_follow);
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
                      [&]<class Operation>(Operation) { return reduce_by_blocks<Operation>(inputs, out, nullptr); });
}

template <class V>
std::size_t reduce_sorted_of(Reduction reduction, std::span<const Entries<V>> inputs, EntriesOut<V> out,
                             std::span<std::uint8_t> givers) {
  TELEGRAD_CHECK(out.indices.size() == out.values.size() && givers.size() >= out.capacity() && inputs.size() <= kGiversMost);
  return on_operation(reduction,
                      [&]<class Operation>(Operation) { return reduce_by_blocks<Operation>(inputs, out, givers.data()); });
}

template <class V>
bool givers_pay(Reduction reduction, std::size_t inputs, std::size_t total, std::uint64_t range) {
  if (inputs < 2 || inputs > kGiversMost || total == 0) return false;
  const double density = static_cast<double>(total) / static_cast<double>(range);
  const bool at_once = inputs > 2 && simd_level() >= SimdLevel::avx512 && sizeof(V) <= 4;
  const double otherwise_ns = merging_ns<V>(inputs, density, at_once) + kFindingGiven_ns * static_cast<double>(inputs - 1);
  return blocks_ns<V>(reduction, density) < otherwise_ns;
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
