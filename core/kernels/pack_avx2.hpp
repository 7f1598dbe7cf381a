#pragma once
// Eight elements at a time: those that a mask names, behind one another, and the reverse. AVX2 has no instruction for
// either, but moves lanes to wherever a table says. For the kernels' own sources; AVX2 alone.

#include "kernels/arithmetic.hpp"
#include "kernels/dispatch.hpp"

#ifdef TELEGRAD_KERNELS_X86
#include "kernels/intrinsics.hpp"

#include <bit>
#include <cstddef>
#include <cstdint>

namespace telegrad::kernels {

/// Of each byte: where its bits are, one behind the other, and how many lie below each place.
struct ByteBits {
  std::uint8_t places[256][8];
  std::uint8_t below[256][8];

  constexpr ByteBits() : places{}, below{} {
    for (unsigned byte = 0; byte < 256; ++byte) {
      std::uint8_t found = 0;
      for (unsigned bit = 0; bit < 8; ++bit) {
        below[byte][bit] = found;
        if ((byte >> bit & 1U) != 0) places[byte][found++] = static_cast<std::uint8_t>(bit);
      }
    }
  }
};
inline constexpr ByteBits kByteBits;

TELEGRAD_AVX2 inline __m256i widened8(const std::uint8_t* bytes) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
}

/// The lanes that `mask`, of 8 bits, names, then others.
TELEGRAD_AVX2 inline __m256i pack8(__m256i lanes, std::uint32_t mask) {
  return _mm256_permutevar8x32_epi32(lanes, widened8(kByteBits.places[mask]));
}

/// The first lanes, each in the next place that `mask` names; in the other places, whatever.
TELEGRAD_AVX2 inline __m256i expand8(__m256i lanes, std::uint32_t mask) {
  return _mm256_permutevar8x32_epi32(lanes, widened8(kByteBits.below[mask]));
}

/// All ones in the lanes that `mask` names, zero in the others.
TELEGRAD_AVX2 inline __m256i lanes_of(std::uint32_t mask) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask)), bits), bits);
}

/// A bit for each lane that has its highest bit set.
TELEGRAD_AVX2 inline std::uint32_t mask_of_lanes(__m256i lanes) {
  return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes)));
}

/// A bit for each of 64 bytes that has its highest bit set.
TELEGRAD_AVX2 inline std::uint64_t mask_of_bytes(__m256i lower, __m256i upper) {
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(lower)) |
         std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_epi8(upper))} << 32;
}

TELEGRAD_AVX2 inline __m256i load8(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
TELEGRAD_AVX2 inline void store8(void* to, __m256i lanes) { _mm256_storeu_si256(static_cast<__m256i*>(to), lanes); }

/// The first `count` of eight elements, then zeros; nothing behind them is read.
TELEGRAD_AVX2 inline __m256i load_first8(const void* from, std::size_t count) {
  const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i wanted = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), places);
  return _mm256_maskload_epi32(static_cast<const int*>(from), wanted);
}

// Four lanes of 64 bits, from where the first four bytes say.
TELEGRAD_AVX2 inline __m256i moved4(__m256i lanes, const std::uint8_t* places) {
  int four = 0;
  __builtin_memcpy(&four, places, sizeof four);
  const __m256i even = _mm256_slli_epi64(_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four)), 1);
  const __m256i pairs = _mm256_or_si256(_mm256_or_si256(even, _mm256_slli_epi64(even, 32)), _mm256_set1_epi64x(1LL << 32));
  return _mm256_permutevar8x32_epi32(lanes, pairs);
}

// Eight lanes of 16 bits, likewise.
TELEGRAD_AVX2 inline __m128i moved8(__m128i lanes, const std::uint8_t* places) {
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(places));
  const __m128i even = _mm_add_epi8(eight, eight);
  return _mm_shuffle_epi8(lanes, _mm_unpacklo_epi8(even, _mm_add_epi8(even, _mm_set1_epi8(1))));
}

/// A bit for each of 8 elements whose bits differ from `none` in `looked_at`.
template <class V>
TELEGRAD_AVX2 inline std::uint32_t differing8(const V* from, typename Format<V>::Bits none, typename Format<V>::Bits looked_at) {
  const __m256i zero = _mm256_setzero_si256();
  if constexpr (sizeof(V) == 8) {
    const __m256i mask = _mm256_set1_epi64x(looked_at);
    const auto differing4 = [&](const V* four) TELEGRAD_AVX2 {
      const __m256i bits = _mm256_and_si256(_mm256_xor_si256(load8(four), _mm256_set1_epi64x(none)), mask);
      return ~static_cast<std::uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(bits, zero)))) & 0xfU;
    };
    return differing4(from) | differing4(from + 4) << 4;
  } else if constexpr (sizeof(V) == 4) {
    const __m256i bits = _mm256_and_si256(_mm256_xor_si256(load8(from), _mm256_set1_epi32(none)), _mm256_set1_epi32(looked_at));
    return ~mask_of_lanes(_mm256_cmpeq_epi32(bits, zero)) & 0xffU;
  } else {
    const __m128i values = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), _mm_set1_epi16(none));
    const __m128i same = _mm_cmpeq_epi16(_mm_and_si128(values, _mm_set1_epi16(looked_at)), _mm_setzero_si128());
    return ~static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(same, same))) & 0xffU;
  }
}

/// Writes those of 8 elements that `marks` names, and their indices, counted from `first`, where 8 may be written: what is behind
/// them, up to there, is of no use. Returns how many they are.
template <class V>
TELEGRAD_AVX2 inline std::size_t pack8_loosely(const V* from, std::uint32_t marks, std::uint32_t first,
                                               std::uint32_t* indices, V* values) {
  const __m128i places = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kByteBits.places[marks]));
  store8(indices, _mm256_add_epi32(_mm256_cvtepu8_epi32(places), _mm256_set1_epi32(static_cast<int>(first))));
  const auto count = static_cast<std::size_t>(__builtin_popcount(marks));
  if constexpr (sizeof(V) == 8) {
    store8(values, moved4(load8(from), kByteBits.places[marks & 0xfU]));
    store8(values + __builtin_popcount(marks & 0xfU), moved4(load8(from + 4), kByteBits.places[marks >> 4]));
  } else if constexpr (sizeof(V) == 4) {
    store8(values, _mm256_permutevar8x32_epi32(load8(from), _mm256_cvtepu8_epi32(places)));
  } else {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values), moved8(eight, kByteBits.places[marks]));
  }
  return count;
}

/// The reverse: writes 8 elements, those that `marks` names from `values`, of which 8 can be read, the others `absent`.
template <class V>
TELEGRAD_AVX2 inline void expand8_to(V* to, std::uint32_t marks, const V* values, V absent) {
  const auto none = std::bit_cast<typename Format<V>::Bits>(absent);
  if constexpr (sizeof(V) == 8) {
    const __m256i bits = _mm256_setr_epi64x(1, 2, 4, 8);
    for (std::uint32_t first = 0; first < 8; first += 4, values += __builtin_popcount(marks & 0xfU), marks >>= 4) {
      const __m256i named = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(marks), bits), bits);
      const __m256i lanes = moved4(load8(values), kByteBits.below[marks & 0xfU]);
      store8(to + first, _mm256_blendv_epi8(_mm256_set1_epi64x(none), lanes, named));
    }
  } else if constexpr (sizeof(V) == 4) {
    store8(to, _mm256_blendv_epi8(_mm256_set1_epi32(none), expand8(load8(values), marks), lanes_of(marks)));
  } else {
    const __m128i bits = _mm_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128);
    const __m128i named = _mm_cmpeq_epi16(_mm_and_si128(_mm_set1_epi16(static_cast<short>(marks)), bits), bits);
    const __m128i lanes = moved8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)), kByteBits.below[marks]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_blendv_epi8(_mm_set1_epi16(none), lanes, named));
  }
}

}  // namespace telegrad::kernels

#endif
