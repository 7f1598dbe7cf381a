#pragma once
// Sixteen elements at a time: which of them count, and those, packed, behind one another. For the kernels' own sources;
// AVX-512 alone.

#include "kernels/arithmetic.hpp"
#include "kernels/dispatch.hpp"

#ifdef TELEGRAD_KERNELS_X86
#include "kernels/intrinsics.hpp"

#include <cstddef>
#include <cstdint>

namespace telegrad::kernels {

inline constexpr std::size_t kGroup = 16;

/// A bit for each of 16 elements whose bits differ from `none` in `looked_at`.
template <class V>
TELEGRAD_AVX512 inline std::uint32_t differing16(const V* from, typename Format<V>::Bits none,
                                                 typename Format<V>::Bits looked_at) {
  if constexpr (sizeof(V) == 8) {
    const __m512i low = _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi64(none));
    const __m512i high = _mm512_xor_si512(_mm512_loadu_si512(from + 8), _mm512_set1_epi64(none));
    const __m512i mask = _mm512_set1_epi64(looked_at);
    return static_cast<std::uint32_t>(_mm512_test_epi64_mask(low, mask)) |
           static_cast<std::uint32_t>(_mm512_test_epi64_mask(high, mask)) << 8;
  } else if constexpr (sizeof(V) == 4) {
    const __m512i values = _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi32(none));
    return _mm512_test_epi32_mask(values, _mm512_set1_epi32(looked_at));
  } else {
    const __m256i values =
        _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), _mm256_set1_epi16(none));
    return _mm256_test_epi16_mask(values, _mm256_set1_epi16(looked_at));
  }
}

/// Writes those of 16 elements that `marks` names, and their indices, counted from `first`. Nothing behind them is
/// written. Returns how many they are.
template <class V>
TELEGRAD_AVX512 inline std::size_t pack16(const V* from, std::uint32_t marks, std::uint32_t first,
                                          std::uint32_t* indices, V* values) {
  const auto count = static_cast<std::size_t>(__builtin_popcount(marks));
  const auto lanes = static_cast<__mmask16>(marks);
  const auto written = static_cast<__mmask16>((1U << count) - 1U);
  const __m512i places = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                          _mm512_set1_epi32(static_cast<int>(first)));
  _mm512_mask_storeu_epi32(indices, written, _mm512_maskz_compress_epi32(lanes, places));
  if constexpr (sizeof(V) == 8) {
    const auto low = static_cast<__mmask8>(marks);
    const auto high = static_cast<__mmask8>(marks >> 8);
    const auto first_count = static_cast<std::size_t>(__builtin_popcount(low));
    const auto second_count = count - first_count;
    _mm512_mask_storeu_epi64(values, static_cast<__mmask8>((1U << first_count) - 1U),
                             _mm512_maskz_compress_epi64(low, _mm512_loadu_si512(from)));
    _mm512_mask_storeu_epi64(values + first_count, static_cast<__mmask8>((1U << second_count) - 1U),
                             _mm512_maskz_compress_epi64(high, _mm512_loadu_si512(from + 8)));
  } else if constexpr (sizeof(V) == 4) {
    _mm512_mask_storeu_epi32(values, written, _mm512_maskz_compress_epi32(lanes, _mm512_loadu_si512(from)));
  } else {
    constexpr __mmask16 kAll = 0xffff;  // GCC 12 takes the forms without a mask for uninitialised
    const __m512i wide = _mm512_maskz_cvtepu16_epi32(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512i packed = _mm512_maskz_compress_epi32(lanes, wide);
    _mm256_mask_storeu_epi16(values, written, _mm512_maskz_cvtepi32_epi16(kAll, packed));
  }
  return count;
}

/// The same, faster, where 16 may be written: what is behind them, up to there, is of no use.
template <class V>
TELEGRAD_AVX512 inline std::size_t pack16_loosely(const V* from, std::uint32_t marks, std::uint32_t first,
                                                  std::uint32_t* indices, V* values) {
  const auto lanes = static_cast<__mmask16>(marks);
  const __m512i places = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                          _mm512_set1_epi32(static_cast<int>(first)));
  _mm512_storeu_si512(indices, _mm512_maskz_compress_epi32(lanes, places));
  if constexpr (sizeof(V) == 8) {
    const auto low = static_cast<__mmask8>(marks);
    const auto high = static_cast<__mmask8>(marks >> 8);
    _mm512_storeu_si512(values, _mm512_maskz_compress_epi64(low, _mm512_loadu_si512(from)));
    _mm512_storeu_si512(values + __builtin_popcount(low), _mm512_maskz_compress_epi64(high, _mm512_loadu_si512(from + 8)));
  } else if constexpr (sizeof(V) == 4) {
    _mm512_storeu_si512(values, _mm512_maskz_compress_epi32(lanes, _mm512_loadu_si512(from)));
  } else {
    constexpr __mmask16 kAll = 0xffff;  // GCC 12 takes the forms without a mask for uninitialised
    const __m512i wide = _mm512_maskz_cvtepu16_epi32(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values),
                        _mm512_maskz_cvtepi32_epi16(kAll, _mm512_maskz_compress_epi32(lanes, wide)));
  }
  return static_cast<std::size_t>(__builtin_popcount(marks));
}

}  // namespace telegrad::kernels

#endif
