#pragma once
// Random words that are a function of a key and a counter alone: any of them can be had without those before it, at any
// vector length. Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
// For the kernels' own sources.

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/dispatch.hpp"
#include "kernels/intrinsics.hpp"

namespace telegrad::kernels::philox {

using Counter = std::array<std::uint32_t, 4>;
using Key = std::array<std::uint32_t, 2>;

inline constexpr int kRounds = 10;
inline constexpr std::uint32_t kMultiplier0 = 0xd2511f53U, kMultiplier1 = 0xcd9e8d57U;
inline constexpr std::uint32_t kWeyl0 = 0x9e3779b9U, kWeyl1 = 0xbb67ae85U;

/// The four words of one counter.
constexpr Counter words_of(Counter counter, Key key) {
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{kMultiplier0} * counter[0];
    const std::uint64_t product1 = std::uint64_t{kMultiplier1} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key = {key[0] + kWeyl0, key[1] + kWeyl1};
  }
  return counter;
}

/// Words are drawn so many at a time: word i of a group is word i / 16 of the counter that is i % 16 beyond the group's,
/// so that 8 or 16 counters in a vector give consecutive words. The group's counter[0] is a multiple of 16.
inline constexpr std::size_t kGroup = 64;
inline constexpr std::uint32_t kCounters = 16;

inline void draw_portable(const Counter& first, const Key& key, std::uint32_t* words) {
  for (std::uint32_t lane = 0; lane < kCounters; ++lane) {
    const Counter drawn = words_of({first[0] + lane, first[1], first[2], first[3]}, key);
    for (std::size_t word = 0; word < drawn.size(); ++word) words[word * kCounters + lane] = drawn[word];
  }
}

#ifdef TELEGRAD_KERNELS_X86

// The high and low halves of 32 × 32-bit products, of which the CPU computes every other one at a time.
TELEGRAD_AVX2 inline void multiply(__m256i lanes, __m256i by, __m256i& high, __m256i& low) {
  const __m256i even = _mm256_mul_epu32(lanes, by);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), by);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}

// With masks that leave nothing out: GCC 12 warns of the variants without.
TELEGRAD_AVX512 inline void multiply(__m512i lanes, __m512i by, __m512i& high, __m512i& low) {
  constexpr __mmask8 kAll = 0xff;
  const __m512i even = _mm512_maskz_mul_epu32(kAll, lanes, by);
  const __m512i odd = _mm512_maskz_mul_epu32(kAll, _mm512_maskz_srli_epi64(kAll, lanes, 32), by);
  high = _mm512_mask_mov_epi32(_mm512_maskz_srli_epi64(kAll, even, 32), 0xaaaa, odd);
  low = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_maskz_slli_epi64(kAll, odd, 32));
}

TELEGRAD_AVX2 inline void draw_avx2(const Counter& first, const Key& key, std::uint32_t* words) {
  const __m256i multiplier0 = _mm256_set1_epi32(static_cast<int>(kMultiplier0));
  const __m256i multiplier1 = _mm256_set1_epi32(static_cast<int>(kMultiplier1));
  for (int half = 0; half < 2; ++half) {
    const __m256i lanes = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(8 * half));
    __m256i c0 = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first[0])), lanes);
    __m256i c1 = _mm256_set1_epi32(static_cast<int>(first[1]));
    __m256i c2 = _mm256_set1_epi32(static_cast<int>(first[2]));
    __m256i c3 = _mm256_set1_epi32(static_cast<int>(first[3]));
    __m256i k0 = _mm256_set1_epi32(static_cast<int>(key[0]));
    __m256i k1 = _mm256_set1_epi32(static_cast<int>(key[1]));
    for (int round = 0; round < kRounds; ++round) {
      __m256i high0, low0, high1, low1;
      multiply(c0, multiplier0, high0, low0);
      multiply(c2, multiplier1, high1, low1);
      c0 = _mm256_xor_si256(_mm256_xor_si256(high1, c1), k0);
      c2 = _mm256_xor_si256(_mm256_xor_si256(high0, c3), k1);
      c1 = low1;
      c3 = low0;
      k0 = _mm256_add_epi32(k0, _mm256_set1_epi32(static_cast<int>(kWeyl0)));
      k1 = _mm256_add_epi32(k1, _mm256_set1_epi32(static_cast<int>(kWeyl1)));
    }
    auto* const out = reinterpret_cast<__m256i*>(words + 8 * half);
    _mm256_storeu_si256(out, c0);
    _mm256_storeu_si256(out + 2, c1);
    _mm256_storeu_si256(out + 4, c2);
    _mm256_storeu_si256(out + 6, c3);
  }
}

TELEGRAD_AVX512 inline void draw_avx512(const Counter& first, const Key& key, std::uint32_t* words) {
  const __m512i multiplier0 = _mm512_set1_epi32(static_cast<int>(kMultiplier0));
  const __m512i multiplier1 = _mm512_set1_epi32(static_cast<int>(kMultiplier1));
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first[0])), lanes);
  __m512i c1 = _mm512_set1_epi32(static_cast<int>(first[1]));
  __m512i c2 = _mm512_set1_epi32(static_cast<int>(first[2]));
  __m512i c3 = _mm512_set1_epi32(static_cast<int>(first[3]));
  __m512i k0 = _mm512_set1_epi32(static_cast<int>(key[0]));
  __m512i k1 = _mm512_set1_epi32(static_cast<int>(key[1]));
  for (int round = 0; round < kRounds; ++round) {
    __m512i high0, low0, high1, low1;
    multiply(c0, multiplier0, high0, low0);
    multiply(c2, multiplier1, high1, low1);
    c0 = _mm512_ternarylogic_epi32(high1, c1, k0, 0x96);  // the exclusive or of three
    c2 = _mm512_ternarylogic_epi32(high0, c3, k1, 0x96);
    c1 = low1;
    c3 = low0;
    k0 = _mm512_add_epi32(k0, _mm512_set1_epi32(static_cast<int>(kWeyl0)));
    k1 = _mm512_add_epi32(k1, _mm512_set1_epi32(static_cast<int>(kWeyl1)));
  }
  _mm512_storeu_si512(words, c0);
  _mm512_storeu_si512(words + 16, c1);
  _mm512_storeu_si512(words + 32, c2);
  _mm512_storeu_si512(words + 48, c3);
}

#endif

}  // namespace telegrad::kernels::philox
