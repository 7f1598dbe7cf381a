#include "kernels/pack_block.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "base/check.hpp"
#include "base/types.hpp"
#include "kernels/arithmetic.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/elementwise.hpp"
#include "kernels/pack_avx2.hpp"
#include "kernels/pack_avx512.hpp"

namespace telegrad::kernels {
namespace {

template <class V>
using PackFunction = void(BlockScratch<V>* scratch, std::uint32_t block, V neutral, PackedBlocks<V>* to, bool others_follow);

constexpr std::uint32_t kWord = 64;
constexpr std::size_t kAtOnce = 16;  // entries that may be written at once

template <class V>
void check_room(const PackedBlocks<V>& to, std::uint64_t marks, bool others_follow) {
  const auto more = static_cast<std::size_t>(std::popcount(marks)) + (others_follow ? kAtOnce : 0);
  TELEGRAD_CHECK(to.count + more <= to.out.capacity());
}

// 64 elements, of which those in `marks` are to be packed. How many those are, nobody foresees: so one by one, but loosely in
// eights, where eight entries more may be written.
template <bool kGivers, class V>
TELEGRAD_INTO_CALLER void pack_singly(const V* results, const std::uint8_t* bytes, std::uint64_t marks, std::uint32_t first_index,
                                      std::uint32_t* indices, V* values, std::uint8_t* givers) {
  const auto count = static_cast<std::size_t>(std::popcount(marks));
  for (std::size_t done = 0; done < count; done += 8) {
    for (std::size_t i = done; i < done + 8; ++i, marks &= marks - 1) {
      const auto place = static_cast<std::uint32_t>(std::countr_zero(marks));  // 64 behind the last one
      indices[i] = first_index + place;
      values[i] = results[place];
      if constexpr (kGivers) givers[i] = bytes[place];
    }
  }
}

// A bit for each of 64 bytes that is not zero.
std::uint64_t marked_portable(const std::uint8_t* bytes) {
  constexpr std::uint64_t kLow = 0x7f7f7f7f7f7f7f7fU;
  std::uint64_t marks = 0;
  for (unsigned first = 0; first < kWord; first += 8) {
    std::uint64_t eight;
    std::memcpy(&eight, bytes + first, sizeof eight);
    const std::uint64_t highs = (((eight & kLow) + kLow) | eight) & ~kLow;  // of each byte
    marks |= (highs >> 7) * 0x0102040810204080U >> 56 << first;
  }
  return marks;
}

template <bool kGivers, class V>
void pack_words_portable(BlockScratch<V>* scratch, std::uint32_t block, V neutral, PackedBlocks<V>* to, bool others_follow) {
  for (std::uint32_t first = 0; first < kBlock; first += kWord) {
    std::uint8_t* const bytes = scratch->marks.data() + first;
    V* const results = scratch->results.data() + first;
    const std::uint64_t marks = marked_portable(bytes);
    if (marks == 0) continue;
    check_room(*to, marks, others_follow);
    const std::uint32_t first_index = block << kBlockBits | first;
    const std::size_t count = to->count;
    to->count += static_cast<std::size_t>(std::popcount(marks));
    if (others_follow) {
      pack_singly<kGivers>(results, bytes, marks, first_index, to->out.indices.data() + count, to->out.values.data() + count,
                           kGivers ? to->marks + count : nullptr);
    } else {
      std::size_t at = count;
      for (std::uint64_t left = marks; left != 0; left &= left - 1, ++at) {
        const auto place = static_cast<std::uint32_t>(std::countr_zero(left));
        to->out.indices[at] = first_index + place;
        to->out.values[at] = results[place];
        if constexpr (kGivers) to->marks[at] = bytes[place];
      }
    }
    std::memset(bytes, 0, kWord);
    std::fill_n(results, kWord, neutral);
  }
}

template <class V>
void pack_portable(BlockScratch<V>* scratch, std::uint32_t block, V neutral, PackedBlocks<V>* to, bool others_follow) {
  to->marks != nullptr ? pack_words_portable<true>(scratch, block, neutral, to, others_follow)
                       : pack_words_portable<false>(scratch, block, neutral, to, others_follow);
}

#ifdef TELEGRAD_KERNELS_X86

static_assert(kGroup == kAtOnce);

// Lines that are written soon: a store that misses holds up those behind it.
template <class V>
TELEGRAD_INTO_CALLER void fetch_ahead(const PackedBlocks<V>& to) {
  constexpr std::size_t kAhead = 256;  // entries
  __builtin_prefetch(to.out.indices.data() + to.count + kAhead, 1);
  __builtin_prefetch(to.out.values.data() + to.count + kAhead, 1);
}

// Those groups of 64 that have a mark, as a list: as branches, which have one would cost more than all else where few have.
using HeldWords = std::array<std::uint8_t, kBlock / kWord + 1>;
static_assert(kBlock / kWord <= 256);

TELEGRAD_AVX2 inline std::uint64_t marked_avx2(const std::uint8_t* marks) {
  const __m256i none = _mm256_setzero_si256();
  return ~mask_of_bytes(_mm256_cmpeq_epi8(load8(marks), none), _mm256_cmpeq_epi8(load8(marks + kWord / 2), none));
}

template <class V>
TELEGRAD_AVX2 std::size_t list_words_avx2(const BlockScratch<V>& scratch, HeldWords& held) {
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

// The same in less time where they are many: eight elements at a time, whatever is marked of them.
template <bool kGivers>
TELEGRAD_AVX2 inline void pack_by_eights(const float* results, const std::uint8_t* bytes, std::uint64_t marks, std::uint32_t first_index,
                                         std::uint32_t* indices, float* values, std::uint8_t* givers) {
  std::size_t count = 0;
  for (std::uint32_t first = 0; first < kWord; first += 8) {
    const auto held = static_cast<std::uint32_t>(marks >> first) & 0xffU;
    if constexpr (kGivers) {
      const __m128i places = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kByteBits.places[held]));
      const __m128i gave = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + first));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(givers + count), _mm_shuffle_epi8(gave, places));
    }
    count += pack8_loosely(results + first, held, first_index + first, indices + count, values + count);
  }
}

template <bool kGivers, class V>
TELEGRAD_AVX2 inline void pack_marked(const V* results, const std::uint8_t* bytes, std::uint64_t marks, std::uint32_t first_index,
                                      std::uint32_t* indices, V* values, std::uint8_t* givers) {
  constexpr int kMany = 12;  // of 64, where eights of them take less time
  if constexpr (std::is_same_v<V, float>) {
    if (std::popcount(marks) >= kMany) return pack_by_eights<kGivers>(results, bytes, marks, first_index, indices, values, givers);
  }
  pack_singly<kGivers>(results, bytes, marks, first_index, indices, values, givers);
}

template <bool kGivers, class V>
TELEGRAD_AVX2 void pack_words_avx2(BlockScratch<V>* scratch, std::uint32_t block, V neutral, PackedBlocks<V>* packed) {
  PackedBlocks<V> to = *packed;
  HeldWords held;
  const std::size_t words = list_words_avx2(*scratch, held);
  for (std::size_t i = 0; i < words; ++i) {
    const std::uint32_t first = held[i] * kWord;
    std::uint8_t* const bytes = scratch->marks.data() + first;
    V* const results = scratch->results.data() + first;
    const std::uint64_t marks = marked_avx2(bytes);
    check_room(to, marks, true);
    fetch_ahead(to);
    pack_marked<kGivers>(results, bytes, marks, block << kBlockBits | first, to.out.indices.data() + to.count,
                         to.out.values.data() + to.count, kGivers ? to.marks + to.count : nullptr);
    to.count += static_cast<std::size_t>(std::popcount(marks));
    clear_word_avx2(bytes, results, neutral);
  }
  packed->count = to.count;
}

template <class V>
void pack_avx2(BlockScratch<V>* scratch, std::uint32_t block, V neutral, PackedBlocks<V>* to, bool others_follow) {
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
TELEGRAD_AVX512 void pack_avx512(BlockScratch<V>* scratch, std::uint32_t block, V neutral, PackedBlocks<V>* to, bool others_follow) {
  for (std::uint32_t first = 0; first < kBlock; first += kWord) {
    std::uint8_t* const bytes = scratch->marks.data() + first;
    const __m512i all = _mm512_load_si512(bytes);
    const std::uint64_t marks = _mm512_test_epi8_mask(all, all);
    if (marks == 0) continue;
    check_room(*to, marks, others_follow);
    fetch_ahead(*to);
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
TELEGRAD_AVX512_VBMI2 std::size_t list_words(const BlockScratch<V>& scratch, HeldWords& held) {
  std::size_t count = 0;
  for (std::uint32_t word = 0; word < kBlock / kWord; ++word) {
    const __m512i all = _mm512_load_si512(scratch.marks.data() + word * kWord);
    held[count] = static_cast<std::uint8_t>(word);
    count += _mm512_test_epi8_mask(all, all) != 0 ? 1 : 0;
  }
  return count;
}

template <bool kLoosely, class V>
TELEGRAD_AVX512_VBMI2 void pack_words(BlockScratch<V>* scratch, std::uint32_t block, V neutral, PackedBlocks<V>* packed) {
  constexpr __mmask16 kAll = 0xffff;
  PackedBlocks<V> to = *packed;
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
    fetch_ahead(to);
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
void pack_vbmi2(BlockScratch<V>* scratch, std::uint32_t block, V neutral, PackedBlocks<V>* to, bool others_follow) {
  others_follow ? pack_words<true>(scratch, block, neutral, to) : pack_words<false>(scratch, block, neutral, to);
}

template <class V>
constexpr Variants<PackFunction<V>> kPack{pack_portable<V>, pack_avx2<V>, pack_avx512<V>, pack_vbmi2<V>};

#else

template <class V>
constexpr Variants<PackFunction<V>> kPack{pack_portable<V>};

#endif

}  // namespace

template <class V>
void pack_block(BlockScratch<V>& scratch, std::uint32_t block, V neutral, PackedBlocks<V>& to, bool others_follow) {
  kPack<V>(&scratch, block, neutral, &to, others_follow);
}

#define TELEGRAD_INSTANTIATE(V) template void pack_block(BlockScratch<V>&, std::uint32_t, V, PackedBlocks<V>&, bool);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad::kernels
