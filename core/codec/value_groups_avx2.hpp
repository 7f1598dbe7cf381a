#pragma once
// The loops of value_groups.hpp in AVX2.

#include "codec/value_groups_portable.hpp"
#include "kernels/dispatch.hpp"

#ifdef TELEGRAD_KERNELS_X86

#include "kernels/intrinsics.hpp"

namespace telegrad::kernels {

inline constexpr int kQwordsInOrder = 0xd8;  // after an operation that packs within halves of a register

TELEGRAD_AVX2 inline __m256i load_avx2(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
TELEGRAD_AVX2 inline void store_avx2(void* to, __m256i bytes) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), bytes);
}
// Two times 16 numbers below 256 as bytes, in order.
TELEGRAD_AVX2 inline __m256i bytes_avx2(__m256i first, __m256i second) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), kQwordsInOrder);
}
TELEGRAD_AVX2 inline __m256i shorts_avx2(__m256i first, __m256i second) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), kQwordsInOrder);
}

// The upper halves of 16 values; puts their tails in their place, if there is one.
template <class W>
TELEGRAD_AVX2 inline __m256i halves_avx2(const std::byte* values, std::byte* tails) {
  if constexpr (sizeof(W) == 2) {
    return load_avx2(values);
  } else {
    const __m256i first = load_avx2(values);
    const __m256i second = load_avx2(values + 32);
    if (tails != nullptr) {
      const __m256i low = _mm256_set1_epi32(0xffff);
      store_avx2(tails, shorts_avx2(_mm256_and_si256(first, low), _mm256_and_si256(second, low)));
    }
    return shorts_avx2(_mm256_srli_epi32(first, 16), _mm256_srli_epi32(second, 16));
  }
}
TELEGRAD_AVX2 inline __m256i exponents_avx2(__m256i first, __m256i second) {
  const __m256i byte = _mm256_set1_epi16(0xff);
  return bytes_avx2(_mm256_and_si256(_mm256_srli_epi16(first, 7), byte),
                    _mm256_and_si256(_mm256_srli_epi16(second, 7), byte));
}
TELEGRAD_AVX2 inline __m256i head_shorts_avx2(__m256i halves) {
  return _mm256_or_si256(_mm256_and_si256(halves, _mm256_set1_epi16(0x7f)),
                         _mm256_and_si256(_mm256_srli_epi16(halves, 8), _mm256_set1_epi16(0x80)));
}

template <class W>
TELEGRAD_AVX2 std::size_t count_avx2(const std::byte* values, std::size_t count, ValueBlock block) {
  const __m256i top = _mm256_set1_epi8(static_cast<char>(block.top));
  const __m256i coded = _mm256_set1_epi8(static_cast<char>(coded_exponents(block.width)));
  std::size_t escapes = 0;
  std::size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i first = halves_avx2<W>(values + i * sizeof(W), nullptr);
    const __m256i second = halves_avx2<W>(values + (i + 16) * sizeof(W), nullptr);
    const __m256i below = _mm256_sub_epi8(top, exponents_avx2(first, second));
    const __m256i beyond = _mm256_cmpeq_epi8(_mm256_max_epu8(below, coded), below);
    escapes += static_cast<unsigned>(__builtin_popcount(static_cast<unsigned>(_mm256_movemask_epi8(beyond))));
  }
  return escapes + count_portable<W>(values + i * sizeof(W), count - i, block);
}

template <class W>
TELEGRAD_AVX2 void write_avx2(const std::byte* values, std::size_t count, ValueBlock block,
                              ValuePlanes<std::byte> planes) {
  const __m256i top = _mm256_set1_epi8(static_cast<char>(block.top));
  const __m256i escape = _mm256_set1_epi8(static_cast<char>(coded_exponents(block.width)));
  const __m128i to_top_bit = _mm_cvtsi32_si128(static_cast<int>(8 - block.width));
  std::uint8_t exponents[kValueGroup];
  for (; count >= kValueGroup; count -= kValueGroup) {
    std::uint64_t escaped = 0;
    for (unsigned part = 0; part < 2; ++part) {
      const __m256i first = halves_avx2<W>(values, planes.tails);
      const __m256i second = halves_avx2<W>(values + 16 * sizeof(W), planes.tails + 32);
      values += 32 * sizeof(W);
      if constexpr (ValueParts<W>::kTails) planes.tails += 64;
      store_avx2(planes.heads, bytes_avx2(head_shorts_avx2(first), head_shorts_avx2(second)));
      planes.heads += 32;
      const __m256i exponent = exponents_avx2(first, second);
      store_avx2(exponents + 32 * part, exponent);
      const __m256i code = _mm256_min_epu8(_mm256_sub_epi8(top, exponent), escape);
      const __m256i is_escape = _mm256_cmpeq_epi8(code, escape);
      escaped |= std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_epi8(is_escape))} << 32 * part;
      __m256i shifted = _mm256_sll_epi16(code, to_top_bit);
      for (unsigned bit = block.width; bit-- > 0;) {
        const int plane = _mm256_movemask_epi8(shifted);
        std::memcpy(planes.codes + bit * sizeof(std::uint64_t) + 4 * part, &plane, sizeof plane);
        shifted = _mm256_add_epi8(shifted, shifted);
      }
    }
    planes.codes += block.width * sizeof(std::uint64_t);
    if (block.width != 0) write_escapes(escaped, exponents, planes);
  }
  write_portable<W>(values, count, block, planes);
}

// 16 values from exponents and heads.
template <class W>
TELEGRAD_AVX2 inline void join_avx2(__m128i exponents, __m128i heads, const std::byte* tails, std::byte* values) {
  const __m256i exponent = _mm256_slli_epi16(_mm256_cvtepu8_epi16(exponents), 7);
  const __m256i head = _mm256_cvtepu8_epi16(heads);
  const __m256i fraction = _mm256_and_si256(head, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(head, _mm256_set1_epi16(0x80)), 8);
  const __m256i halves = _mm256_or_si256(exponent, _mm256_or_si256(fraction, sign));
  if constexpr (sizeof(W) == 2) {
    store_avx2(values, halves);
  } else {
    const __m256i low = _mm256_permute4x64_epi64(load_avx2(tails), kQwordsInOrder);
    const __m256i high = _mm256_permute4x64_epi64(halves, kQwordsInOrder);
    store_avx2(values, _mm256_unpacklo_epi16(low, high));
    store_avx2(values + 32, _mm256_unpackhi_epi16(low, high));
  }
}

template <class W>
TELEGRAD_AVX2 bool read_avx2(ValuePlanes<const std::byte> planes, ValueBlock block, std::byte* values,
                             std::size_t count) {
  const __m256i top = _mm256_set1_epi8(static_cast<char>(block.top));
  const __m256i escape = _mm256_set1_epi8(static_cast<char>(coded_exponents(block.width)));
  const __m256i byte_of_bit = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                               2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i bit_of_byte = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201U));
  for (; count >= kValueGroup; count -= kValueGroup) {
    std::uint64_t escaped = 0;
    std::byte* const group = values;
    for (unsigned part = 0; part < 2; ++part) {
      __m256i code = _mm256_setzero_si256();
      for (unsigned bit = block.width; bit-- > 0;) {
        int plane;
        std::memcpy(&plane, planes.codes + bit * sizeof(std::uint64_t) + 4 * part, sizeof plane);
        const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(plane), byte_of_bit), bit_of_byte);
        // Minus one where it is set.
        code = _mm256_sub_epi8(_mm256_add_epi8(code, code), _mm256_cmpeq_epi8(bits, bit_of_byte));
      }
      const __m256i is_escape = _mm256_cmpeq_epi8(code, escape);
      escaped |= std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_epi8(is_escape))} << 32 * part;
      const __m256i exponents = _mm256_sub_epi8(top, code);
      const __m256i heads = load_avx2(planes.heads);
      join_avx2<W>(_mm256_castsi256_si128(exponents), _mm256_castsi256_si128(heads), planes.tails, values);
      join_avx2<W>(_mm256_extracti128_si256(exponents, 1), _mm256_extracti128_si256(heads, 1), planes.tails + 32,
                   values + 16 * sizeof(W));
      values += 32 * sizeof(W);
      planes.heads += 32;
      if constexpr (ValueParts<W>::kTails) planes.tails += 64;
    }
    planes.codes += block.width * sizeof(std::uint64_t);
    if (block.width != 0 && !read_escapes<W>(escaped, planes, group)) return false;
  }
  return read_portable<W>(planes, block, values, count);
}

}  // namespace telegrad::kernels

#endif
