#pragma once
// The loops of value_groups.hpp in AVX-512.

#include "codec/value_groups_portable.hpp"
#include "kernels/dispatch.hpp"

#ifdef TELEGRAD_KERNELS_X86

#include "kernels/intrinsics.hpp"

namespace telegrad::kernels {

// Of 64 values.
struct Halves512 {
  __m512i first;
  __m512i second;
};

TELEGRAD_AVX512 inline __m512i odd_shorts_avx512(unsigned odd) {
  const __m512i even = _mm512_set_epi32(0x3e003c, 0x3a0038, 0x360034, 0x320030, 0x2e002c, 0x2a0028, 0x260024, 0x220020,
                                        0x1e001c, 0x1a0018, 0x160014, 0x120010, 0x0e000c, 0x0a0008, 0x060004, 0x020000);
  return _mm512_add_epi16(even, _mm512_set1_epi16(static_cast<short>(odd)));
}

// The upper halves of 64 values.
template <class W>
TELEGRAD_AVX512 inline Halves512 halves_avx512(const std::byte* values, std::byte* tails) {
  if constexpr (sizeof(W) == 2) {
    return {_mm512_loadu_si512(values), _mm512_loadu_si512(values + 64)};
  } else {
    const __m512i a = _mm512_loadu_si512(values);
    const __m512i b = _mm512_loadu_si512(values + 64);
    const __m512i c = _mm512_loadu_si512(values + 128);
    const __m512i d = _mm512_loadu_si512(values + 192);
    if (tails != nullptr) {
      const __m512i low = odd_shorts_avx512(0);
      _mm512_storeu_si512(tails, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(tails + 64, _mm512_permutex2var_epi16(c, low, d));
    }
    const __m512i high = odd_shorts_avx512(1);
    return {_mm512_permutex2var_epi16(a, high, b), _mm512_permutex2var_epi16(c, high, d)};
  }
}
// Two times 32 numbers, cut down to bytes.
TELEGRAD_AVX512 inline __m512i bytes_avx512(__m512i first, __m512i second) {
  constexpr __mmask32 kAll = 0xffffffffU;
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_maskz_cvtepi16_epi8(kAll, first)),
                            _mm512_maskz_cvtepi16_epi8(kAll, second), 1);
}
TELEGRAD_AVX512 inline __m512i exponents_avx512(const Halves512& halves) {
  return bytes_avx512(_mm512_srli_epi16(halves.first, 7), _mm512_srli_epi16(halves.second, 7));
}
TELEGRAD_AVX512 inline __m512i head_shorts_avx512(__m512i halves) {
  constexpr int kSelect = 0xca;  // a where the mask is set, else b
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(0x7f), halves, _mm512_srli_epi16(halves, 8), kSelect);
}

template <class W>
TELEGRAD_AVX512 std::size_t count_avx512(const std::byte* values, std::size_t count, ValueBlock block) {
  const __m512i top = _mm512_set1_epi8(static_cast<char>(block.top));
  const __m512i coded = _mm512_set1_epi8(static_cast<char>(coded_exponents(block.width)));
  std::size_t escapes = 0;
  std::size_t i = 0;
  for (; i + kValueGroup <= count; i += kValueGroup) {
    const __m512i exponents = exponents_avx512(halves_avx512<W>(values + i * sizeof(W), nullptr));
    const std::uint64_t beyond = _mm512_cmpge_epu8_mask(_mm512_sub_epi8(top, exponents), coded);
    escapes += static_cast<std::size_t>(__builtin_popcountll(beyond));
  }
  return escapes + count_portable<W>(values + i * sizeof(W), count - i, block);
}

template <class W>
TELEGRAD_AVX512 void write_avx512(const std::byte* values, std::size_t count, ValueBlock block,
                                  ValuePlanes<std::byte> planes) {
  const __m512i top = _mm512_set1_epi8(static_cast<char>(block.top));
  const __m512i escape = _mm512_set1_epi8(static_cast<char>(coded_exponents(block.width)));
  std::uint8_t exponents[kValueGroup];
  for (; count >= kValueGroup; count -= kValueGroup) {
    const Halves512 halves = halves_avx512<W>(values, planes.tails);
    values += kValueGroup * sizeof(W);
    if constexpr (ValueParts<W>::kTails) planes.tails += 2 * kValueGroup;
    _mm512_storeu_si512(planes.heads, bytes_avx512(head_shorts_avx512(halves.first), head_shorts_avx512(halves.second)));
    planes.heads += kValueGroup;
    const __m512i exponent = exponents_avx512(halves);
    _mm512_storeu_si512(exponents, exponent);
    const __m512i code = _mm512_min_epu8(_mm512_sub_epi8(top, exponent), escape);
    for (unsigned bit = 0; bit < block.width; ++bit) {
      store_word(planes.codes, _mm512_test_epi8_mask(code, _mm512_set1_epi8(static_cast<char>(1 << bit))));
      planes.codes += sizeof(std::uint64_t);
    }
    if (block.width != 0) write_escapes(_mm512_cmpeq_epi8_mask(code, escape), exponents, planes);
  }
  write_portable<W>(values, count, block, planes);
}

template <class W>
TELEGRAD_AVX512 bool read_avx512(ValuePlanes<const std::byte> planes, ValueBlock block, std::byte* values,
                                 std::size_t count) {
  const __m512i top = _mm512_set1_epi8(static_cast<char>(block.top));
  const __m512i escape = _mm512_set1_epi8(static_cast<char>(coded_exponents(block.width)));
  constexpr __mmask32 kAll = 0xffffffffU;
  for (; count >= kValueGroup; count -= kValueGroup) {
    __m512i code = _mm512_setzero_si512();
    for (unsigned bit = 0; bit < block.width; ++bit) {
      const __m512i worth = _mm512_set1_epi8(static_cast<char>(1 << bit));
      code = _mm512_mask_add_epi8(code, load_word(planes.codes), code, worth);
      planes.codes += sizeof(std::uint64_t);
    }
    const __m512i exponents = _mm512_sub_epi8(top, code);
    const __m512i heads = _mm512_loadu_si512(planes.heads);
    const auto join = [&](__m256i exponent_bytes, __m256i head_bytes) TELEGRAD_AVX512 {
      const __m512i exponent = _mm512_slli_epi16(_mm512_maskz_cvtepu8_epi16(kAll, exponent_bytes), 7);
      const __m512i head = _mm512_maskz_cvtepu8_epi16(kAll, head_bytes);
      const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(head, 8), _mm512_set1_epi16(static_cast<short>(0x8000)));
      const __m512i fraction = _mm512_and_si512(head, _mm512_set1_epi16(0x7f));
      return _mm512_or_si512(exponent, _mm512_or_si512(sign, fraction));
    };
    const __m512i first = join(_mm512_castsi512_si256(exponents), _mm512_castsi512_si256(heads));
    const __m512i second = join(_mm512_extracti64x4_epi64(exponents, 1), _mm512_extracti64x4_epi64(heads, 1));
    if constexpr (sizeof(W) == 2) {
      _mm512_storeu_si512(values, first);
      _mm512_storeu_si512(values + 64, second);
    } else {
      // Of 32 pairs of shorts the first and the last 16.
      const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                           36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
      const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
      const __m512i first_tails = _mm512_loadu_si512(planes.tails);
      const __m512i second_tails = _mm512_loadu_si512(planes.tails + 64);
      planes.tails += 2 * kValueGroup;
      _mm512_storeu_si512(values, _mm512_permutex2var_epi16(first_tails, low, first));
      _mm512_storeu_si512(values + 64, _mm512_permutex2var_epi16(first_tails, high, first));
      _mm512_storeu_si512(values + 128, _mm512_permutex2var_epi16(second_tails, low, second));
      _mm512_storeu_si512(values + 192, _mm512_permutex2var_epi16(second_tails, high, second));
    }
    planes.heads += kValueGroup;
    if (block.width != 0 && !read_escapes<W>(_mm512_cmpeq_epi8_mask(code, escape), planes, values)) return false;
    values += kValueGroup * sizeof(W);
  }
  return read_portable<W>(planes, block, values, count);
}

}  // namespace telegrad::kernels

#endif
