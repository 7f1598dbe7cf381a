#include "kernels/marks.hpp"

#include <algorithm>
#include <bit>

#include "base/check.hpp"
#include "base/types.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/elementwise.hpp"
#include "kernels/intrinsics.hpp"
#include "kernels/pack_avx2.hpp"

namespace telegrad::kernels {
namespace {

constexpr std::size_t kWord = 64;

constexpr std::size_t kGroup = 16;

// Where marking goes on: what is done of the indices, and the least offset that the next one may have.
struct Marked {
  std::size_t count = 0;
  std::uint64_t least = 0;
};

// Some of the first indices; stops before what may be wrong.
using MarkFunction = Marked(const std::uint32_t* indices, std::size_t count, std::uint64_t base, std::size_t range,
                            std::uint64_t least, std::uint64_t* marks);

Marked mark_portable(const std::uint32_t*, std::size_t, std::uint64_t, std::size_t, std::uint64_t least,
                     std::uint64_t*) {
  return {0, least};
}

using CountFunction = std::size_t(const std::uint64_t* marks, std::size_t words);

TELEGRAD_INTO_CALLER std::size_t count_all(const std::uint64_t* marks, std::size_t words) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < words; ++i) count += static_cast<std::size_t>(std::popcount(marks[i]));
  return count;
}

std::size_t count_portable(const std::uint64_t* marks, std::size_t words) { return count_all(marks, words); }

#ifdef TELEGRAD_KERNELS_X86

TELEGRAD_AVX2 std::size_t count_avx2(const std::uint64_t* marks, std::size_t words) { return count_all(marks, words); }

constexpr Variants<CountFunction> kCount{count_portable, count_avx2};

// A word of marks from `first` on, where two words hold it.
TELEGRAD_AVX2 inline void put_marks(std::uint64_t* marks, std::size_t first, std::uint64_t word) {
  const std::size_t within = first % kWord;
  marks[first / kWord] |= word << within;
  marks[first / kWord + 1] |= word >> 1 >> (kWord - 1 - within);
}

TELEGRAD_AVX2 inline std::uint32_t last_of(__m256i eight) {
  return static_cast<std::uint32_t>(_mm_extract_epi32(_mm256_extracti128_si256(eight, 1), 3));
}

// Offsets below that have a word behind their own, to which the marks of a group may go on.
std::size_t firsts_end_of(std::size_t range) { return range < 2 * kWord ? 0 : (range / kWord - 1) * kWord; }

// Eight indices at a time, as long as they lie within the length of a word. Every index is read once.
TELEGRAD_AVX2 Marked mark_avx2(const std::uint32_t* indices, std::size_t count, std::uint64_t base, std::size_t range,
                               std::uint64_t least, std::uint64_t* marks) {
  constexpr std::size_t kEight = 8;
  const std::size_t firsts_end = firsts_end_of(range);
  const __m256i from = _mm256_set1_epi32(static_cast<int>(base));
  const __m256i one = _mm256_set1_epi64x(1);
  const __m256i lane_before = _mm256_setr_epi32(0, 0, 1, 2, 3, 4, 5, 6);
  Marked done{0, least};
  for (; done.count + kEight <= count; done.count += kEight) {
    const __m256i offsets = _mm256_sub_epi32(load8(indices + done.count), from);
    const __m128i head = _mm256_castsi256_si128(offsets);
    const std::size_t first = static_cast<std::uint32_t>(_mm_cvtsi128_si32(head));
    const __m256i within = _mm256_sub_epi32(offsets, _mm256_broadcastd_epi32(head));
    // What does not rise, as numbers with a sign, does not rise by less than 2^31.
    const __m256i rises = _mm256_cmpgt_epi32(within, _mm256_permutevar8x32_epi32(within, lane_before));
    const std::uint32_t last = last_of(within);
    if (mask_of_lanes(rises) != 0xfeU || last >= kWord || first < done.least || first >= firsts_end) break;
    const __m256i low = _mm256_sllv_epi64(one, _mm256_cvtepu32_epi64(_mm256_castsi256_si128(within)));
    const __m256i high = _mm256_sllv_epi64(one, _mm256_cvtepu32_epi64(_mm256_extracti128_si256(within, 1)));
    const __m256i four = _mm256_or_si256(low, high);
    const __m128i two = _mm_or_si128(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    put_marks(marks, first, static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_or_si128(two, _mm_unpackhi_epi64(two, two)))));
    done.least = std::uint64_t{first} + last + 1;
  }
  return done;
}

TELEGRAD_AVX512 inline std::uint64_t any_of(__m512i eight) {
  const __m256i four = _mm256_or_si256(_mm512_castsi512_si256(eight), _mm512_maskz_extracti64x4_epi64(0xff, eight, 1));
  const __m128i two = _mm_or_si128(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_or_si128(two, _mm_unpackhi_epi64(two, two))));
}

// Sixteen indices at a time, as long as all or each eight of them lie within the length of a word. Every index is read once.
TELEGRAD_AVX512 Marked mark_avx512(const std::uint32_t* indices, std::size_t count, std::uint64_t base,
                                   std::size_t range, std::uint64_t least, std::uint64_t* marks) {
  constexpr std::size_t kAhead = 1024;  // what the cache would fetch by itself, but too late
  constexpr __mmask16 kAllButFirst = 0xfffe;
  const std::size_t firsts_end = firsts_end_of(range);
  const __m512i from = _mm512_set1_epi32(static_cast<int>(base));
  const __m512i one = _mm512_set1_epi64(1);
  const __m512i lane_before = _mm512_setr_epi32(0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14);
  Marked done{0, least};
  for (; done.count + kGroup <= count; done.count += kGroup) {
    __builtin_prefetch(indices + done.count + kAhead);
    const __m512i offsets = _mm512_sub_epi32(_mm512_loadu_si512(indices + done.count), from);
    const __m128i head = _mm512_castsi512_si128(offsets);
    const std::size_t first = static_cast<std::uint32_t>(_mm_cvtsi128_si32(head));
    const __m512i within = _mm512_sub_epi32(offsets, _mm512_maskz_broadcastd_epi32(0xffff, head));
    const __m512i before = _mm512_maskz_permutexvar_epi32(0xffff, lane_before, within);
    if (_mm512_mask_cmpgt_epu32_mask(kAllButFirst, within, before) != kAllButFirst) break;
    const __m256i lower = _mm512_castsi512_si256(within);
    const __m256i upper = _mm512_maskz_extracti64x4_epi64(0xff, within, 1);
    const std::uint32_t last = last_of(upper);
    if (first < done.least || first >= firsts_end) break;
    // A shift by 64 or more leaves nothing.
    const __m512i low = _mm512_sllv_epi64(one, _mm512_maskz_cvtepu32_epi64(0xff, lower));
    const __m512i high = _mm512_maskz_cvtepu32_epi64(0xff, upper);
    if (last < kWord) {
      put_marks(marks, first, any_of(_mm512_or_si512(low, _mm512_sllv_epi64(one, high))));
    } else {
      const auto middle = static_cast<std::uint32_t>(_mm_cvtsi128_si32(_mm256_castsi256_si128(upper)));
      if (last_of(lower) >= kWord || last - middle >= kWord || first + middle >= firsts_end) break;
      put_marks(marks, first, any_of(low));
      put_marks(marks, first + middle, any_of(_mm512_sllv_epi64(one, _mm512_sub_epi64(high, _mm512_set1_epi64(middle)))));
    }
    done.least = std::uint64_t{first} + last + 1;
  }
  return done;
}

constexpr Variants<MarkFunction> kMark{mark_portable, mark_avx2, mark_avx512};

#else

constexpr Variants<CountFunction> kCount{count_portable};
constexpr Variants<MarkFunction> kMark{mark_portable};

#endif

// Where a kernel goes on: words and values that are done.
struct Progress {
  std::size_t words = 0;
  std::size_t values = 0;
};

template <class V>
using ExpandFunction = Progress(V* dense, const std::uint64_t* marks, std::size_t words, const V* values,
                                std::size_t count, V absent);

template <class V>
Progress expand_portable(V*, const std::uint64_t*, std::size_t, const V*, std::size_t, V) {
  return {};
}

#ifdef TELEGRAD_KERNELS_X86

// As long as eight values can be read, whatever is marked.
template <class V>
TELEGRAD_AVX2 Progress expand_avx2(V* dense, const std::uint64_t* marks, std::size_t words, const V* values,
                                   std::size_t count, V absent) {
  constexpr std::size_t kEight = 8;
  Progress at;
  for (; at.words < words && at.values + kWord + kEight <= count; ++at.words) {
    std::uint64_t word = marks[at.words];
    V* const to = dense + at.words * kWord;
    for (std::size_t first = 0; first < kWord; first += kEight, word >>= kEight) {
      const auto eight = static_cast<std::uint32_t>(word & 0xffU);
      expand8_to(to + first, eight, values + at.values, absent);
      at.values += static_cast<std::size_t>(std::popcount(eight));
    }
  }
  return at;
}

// The first 16 values, or where there may be no more, so many as there are.
template <bool kAll, class V>
TELEGRAD_AVX512 inline __m512i load16(const V* values, int count) {
  if constexpr (sizeof(V) == 4) {
    if constexpr (kAll) return _mm512_loadu_si512(values);
    return _mm512_maskz_loadu_epi32(static_cast<__mmask16>(_bzhi_u32(0xffff, static_cast<unsigned>(count))), values);
  } else if constexpr (sizeof(V) == 8) {
    if constexpr (kAll) return _mm512_loadu_si512(values);
    return _mm512_maskz_loadu_epi64(static_cast<__mmask8>(_bzhi_u32(0xff, static_cast<unsigned>(count))), values);
  } else {
    const auto lanes = static_cast<__mmask16>(kAll ? 0xffff : _bzhi_u32(0xffff, static_cast<unsigned>(count)));
    return _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_maskz_loadu_epi16(lanes, values));
  }
}

// 16 elements. `kAll`: 16 values can be read, whatever is marked.
template <bool kAll, class V>
TELEGRAD_AVX512 inline void expand16(V* dense, std::uint32_t marks, const V* values, V absent) {
  if constexpr (sizeof(V) == 8) {
    const __m512i none = _mm512_set1_epi64(std::bit_cast<std::int64_t>(absent));
    const auto low = static_cast<__mmask8>(marks);
    const auto high = static_cast<__mmask8>(marks >> 8);
    const int before = std::popcount(low);
    _mm512_storeu_si512(dense, _mm512_mask_expand_epi64(none, low, load16<kAll>(values, before)));
    _mm512_storeu_si512(dense + 8,
                        _mm512_mask_expand_epi64(none, high, load16<kAll>(values + before, std::popcount(high))));
  } else if constexpr (sizeof(V) == 4) {
    const __m512i none = _mm512_set1_epi32(std::bit_cast<std::int32_t>(absent));
    const auto lanes = static_cast<__mmask16>(marks);
    _mm512_storeu_si512(dense, _mm512_mask_expand_epi32(none, lanes, load16<kAll>(values, std::popcount(marks))));
  } else {
    const __m512i none = _mm512_set1_epi32(std::bit_cast<std::uint16_t>(absent));
    const auto lanes = static_cast<__mmask16>(marks);
    const __m512i expanded = _mm512_mask_expand_epi32(none, lanes, load16<kAll>(values, std::popcount(marks)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dense), _mm512_maskz_cvtepi32_epi16(0xffff, expanded));
  }
}

template <bool kAll, class V>
TELEGRAD_AVX512 inline void expand_word(V* out, std::uint64_t word, const V* next, V absent) {
  expand16<kAll>(out, static_cast<std::uint32_t>(word & 0xffffU), next, absent);
  expand16<kAll>(out + 16, static_cast<std::uint32_t>(word >> 16 & 0xffffU), next + std::popcount(word & 0xffffU), absent);
  expand16<kAll>(out + 32, static_cast<std::uint32_t>(word >> 32 & 0xffffU), next + std::popcount(word & 0xffffffffU),
                 absent);
  expand16<kAll>(out + 48, static_cast<std::uint32_t>(word >> 48), next + std::popcount(word & 0xffffffffffffU), absent);
}

template <class V>
TELEGRAD_AVX512 Progress expand_avx512(V* dense, const std::uint64_t* marks, std::size_t words, const V* values,
                                       std::size_t count, V absent) {
  constexpr std::size_t kReadMost = kWord + 16;  // values, of a word, where all are read
  constexpr std::size_t kAheadBytes = 4096;      // what the cache would fetch by itself, but too late
  Progress at;
  for (; at.words < words && at.values + kReadMost <= count; ++at.words) {
    const std::uint64_t word = marks[at.words];
    const V* const next = values + at.values;
    const char* const ahead = reinterpret_cast<const char*>(next) + kAheadBytes;
    for (std::size_t byte = 0; byte < kWord * sizeof(V); byte += 64) __builtin_prefetch(ahead + byte);
    expand_word<true>(dense + at.words * kWord, word, next, absent);
    at.values += static_cast<std::size_t>(std::popcount(word));
  }
  for (; at.words < words; ++at.words) {
    expand_word<false>(dense + at.words * kWord, marks[at.words], values + at.values, absent);
    at.values += static_cast<std::size_t>(std::popcount(marks[at.words]));
  }
  return at;
}

template <class V>
constexpr Variants<ExpandFunction<V>> kExpand{expand_portable<V>, expand_avx2<V>, expand_avx512<V>};

#else

template <class V>
constexpr Variants<ExpandFunction<V>> kExpand{expand_portable<V>};

#endif

template <class V>
void expand_rest(std::span<V> dense, std::span<const std::uint64_t> marks, std::span<const V> values, V absent,
                 Progress at) {
  for (; at.words < marks.size(); ++at.words) {
    const std::span<V> out = dense.subspan(at.words * kWord, std::min(kWord, dense.size() - at.words * kWord));
    std::ranges::fill(out, absent);
    for (std::uint64_t left = marks[at.words]; left != 0; left &= left - 1) {
      out[static_cast<std::size_t>(std::countr_zero(left))] = values[at.values++];
    }
  }
}

void check_sizes(std::size_t range, std::span<const std::uint64_t> marks, std::size_t values) {
  TELEGRAD_CHECK(marks.size() == mark_words(range));
  TELEGRAD_CHECK(count_marks(marks) == values);
  TELEGRAD_CHECK(range % kWord == 0 || marks.back() >> range % kWord == 0);
}

}  // namespace

bool mark(std::span<const std::uint32_t> indices, std::uint64_t base, std::size_t range,
          std::span<std::uint64_t> marks) {
  TELEGRAD_CHECK(marks.size() == mark_words(range));
  std::ranges::fill(marks, 0U);
  std::uint64_t least = 0;  // offset that the next one may have
  while (!indices.empty()) {
    const Marked some = kMark(indices.data(), indices.size(), base, range, least, marks.data());
    indices = indices.subspan(some.count);
    least = some.least;
    // Those that lie too far apart, or are wrong, one by one.
    for (const std::uint32_t index : indices.first(std::min(kGroup, indices.size()))) {
      const std::uint64_t offset = index - base;
      if (offset < least || offset >= range) return false;
      marks[offset / kWord] |= std::uint64_t{1} << offset % kWord;
      least = offset + 1;
    }
    indices = indices.subspan(std::min(kGroup, indices.size()));
  }
  return true;
}

void slice_marks(std::span<const std::uint64_t> marks, std::size_t begin, std::size_t range,
                 std::span<std::uint64_t> slice) {
  TELEGRAD_CHECK(slice.size() == mark_words(range) && begin + range <= marks.size() * kWord);
  const std::uint64_t* const from = marks.data() + begin / kWord;
  const std::size_t within = begin % kWord;
  const std::size_t words = range / kWord;
  for (std::size_t i = 0; i < words; ++i) {
    slice[i] = within == 0 ? from[i] : from[i] >> within | from[i + 1] << (kWord - within);
  }
  const std::size_t rest = range % kWord;
  if (rest == 0) return;
  std::uint64_t last = from[words] >> within;
  if (within + rest > kWord) last |= from[words + 1] << (kWord - within);
  slice[words] = last & ((std::uint64_t{1} << rest) - 1);
}

std::size_t count_marks(std::span<const std::uint64_t> marks) {
  return kCount(marks.data(), marks.size());
}

template <class V>
void expand_marks(std::span<V> dense, std::span<const std::uint64_t> marks, std::span<const V> values, V absent) {
  check_sizes(dense.size(), marks, values.size());
  const Progress at =
      kExpand<V>(dense.data(), marks.data(), dense.size() / kWord, values.data(), values.size(), absent);
  expand_rest(dense, marks, values, absent, at);
}

namespace reference {

bool mark(std::span<const std::uint32_t> indices, std::uint64_t base, std::size_t range,
          std::span<std::uint64_t> marks) {
  std::ranges::fill(marks, 0U);
  std::uint64_t least = base;
  for (const std::uint32_t index : indices) {
    if (index < least || index >= base + range) return false;
    marks[(index - base) / kWord] |= std::uint64_t{1} << (index - base) % kWord;
    least = std::uint64_t{index} + 1;
  }
  return true;
}

template <class V>
void expand_marks(std::span<V> dense, std::span<const std::uint64_t> marks, std::span<const V> values, V absent) {
  std::size_t next = 0;
  for (std::size_t i = 0; i < dense.size(); ++i) {
    dense[i] = (marks[i / kWord] >> i % kWord & 1U) != 0 ? values[next++] : absent;
  }
}

}  // namespace reference

#define TELEGRAD_INSTANTIATE(V)                                                                             \
  template void expand_marks(std::span<V>, std::span<const std::uint64_t>, std::span<const V>, V);          \
  template void reference::expand_marks(std::span<V>, std::span<const std::uint64_t>, std::span<const V>, V);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad::kernels
