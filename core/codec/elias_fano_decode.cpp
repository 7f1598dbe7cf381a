#include <cstring>

#include "base/check.hpp"
#include "codec/bit_words.hpp"
#include "codec/elias_fano.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/intrinsics.hpp"
#include "kernels/pack_avx2.hpp"

namespace telegrad::kernels {
namespace {

using DecodeFunction = bool(const std::byte* lows, const std::byte* highs, std::size_t high_bytes,
                            std::uint32_t before, unsigned width, std::uint32_t* numbers, std::size_t count);

// Word `at` of a section; bits beyond its end are zero.
std::uint64_t section_word(const std::byte* section, std::size_t bytes, std::size_t at) {
  const std::uint64_t word = load_word(section + at);
  return bytes - at >= 8 ? word : word & low_bits(8 * (bytes - at));
}

bool decode_portable(const std::byte* lows, const std::byte* highs, std::size_t high_bytes, std::uint32_t before,
                     unsigned width, std::uint32_t* numbers, std::size_t count) {
  std::size_t j = 0;
  for (std::size_t at = 0; at < high_bytes; at += 8) {
    for (std::uint64_t word = section_word(highs, high_bytes, at); word != 0; word &= word - 1) {
      if (j == count) return false;
      const std::size_t high = 8 * at + static_cast<std::size_t>(std::countr_zero(word)) - j;
      const std::uint64_t low = load_word(lows + j * width / 8) >> j * width % 8 & low_bits(width);
      numbers[j] = static_cast<std::uint32_t>(before + 1 + j + (high << width | low));
      ++j;
    }
  }
  return j == count;
}

#ifdef TELEGRAD_KERNELS_X86

// Of the set bits; the last store, of a whole vector, goes beyond them.
using Positions = std::uint32_t[kEliasFanoMost + 16];

TELEGRAD_AVX2 bool positions_avx2(const std::byte* highs, std::size_t high_bytes, std::size_t count,
                                  Positions& positions) {
  std::size_t found = 0;
  for (std::size_t at = 0; at < high_bytes; at += 8) {
    std::uint64_t word = section_word(highs, high_bytes, at);
    if (found + static_cast<std::size_t>(std::popcount(word)) > count) return false;
    for (std::size_t bit = 8 * at; word != 0; word >>= 8, bit += 8) {
      const __m256i places = widened8(kByteBits.places[word & 255]);
      const __m256i bits = _mm256_add_epi32(places, _mm256_set1_epi32(static_cast<int>(bit)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions + found), bits);
      found += static_cast<std::size_t>(std::popcount(word & 255));
    }
  }
  return found == count;
}

TELEGRAD_AVX512 bool positions_avx512(const std::byte* highs, std::size_t high_bytes, std::size_t count,
                                      Positions& positions) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  std::size_t found = 0;
  for (std::size_t at = 0; at < high_bytes; at += 8) {
    const std::uint64_t word = section_word(highs, high_bytes, at);
    const auto all = static_cast<std::size_t>(std::popcount(word));
    if (found + all > count) return false;
    for (unsigned part = 0; part < 64; part += 16) {
      const __m512i bits = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(8 * at + part)));
      const auto earlier = static_cast<std::size_t>(std::popcount(word & low_bits(part)));
      _mm512_storeu_si512(positions + found + earlier,
                          _mm512_maskz_compress_epi32(static_cast<__mmask16>(word >> part), bits));
    }
    found += all;
  }
  return found == count;
}

TELEGRAD_AVX2 bool decode_avx2(const std::byte* lows, const std::byte* highs, std::size_t high_bytes,
                               std::uint32_t before, unsigned width, std::uint32_t* numbers, std::size_t count) {
  Positions positions;
  if (!positions_avx2(highs, high_bytes, count, positions)) return false;
  // Eight low parts are `width` bytes: each lies in the four bytes `from` and the next four.
  __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i first_bit = _mm256_mullo_epi32(index, _mm256_set1_epi32(static_cast<int>(width)));
  const __m256i from = _mm256_srli_epi32(first_bit, 5);
  const __m256i next = _mm256_add_epi32(from, _mm256_set1_epi32(1));
  const __m256i right = _mm256_and_si256(first_bit, _mm256_set1_epi32(31));
  const __m256i left = _mm256_sub_epi32(_mm256_set1_epi32(32), right);
  const __m256i keep = _mm256_set1_epi32(static_cast<int>(low_bits(width)));
  const __m256i start = _mm256_set1_epi32(static_cast<int>(before + 1));
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(width));
  for (std::size_t j = 0; j < count; j += 8, lows += width) {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lows));
    const __m256i low = _mm256_and_si256(
        keep, _mm256_or_si256(_mm256_srlv_epi32(_mm256_permutevar8x32_epi32(packed, from), right),
                              _mm256_sllv_epi32(_mm256_permutevar8x32_epi32(packed, next), left)));
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(positions + j));
    const __m256i high = _mm256_sll_epi32(_mm256_sub_epi32(bits, index), shift);
    const __m256i number = _mm256_add_epi32(_mm256_add_epi32(start, index), _mm256_or_si256(high, low));
    index = _mm256_add_epi32(index, _mm256_set1_epi32(8));
    if (j + 8 <= count) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers + j), number);
    } else {
      std::uint32_t last[8];
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(last), number);
      std::memcpy(numbers + j, last, (count - j) * sizeof(std::uint32_t));
    }
  }
  return true;
}

TELEGRAD_AVX512 bool decode_avx512(const std::byte* lows, const std::byte* highs, std::size_t high_bytes,
                                   std::uint32_t before, unsigned width, std::uint32_t* numbers, std::size_t count) {
  Positions positions;
  if (!positions_avx512(highs, high_bytes, count, positions)) return false;
  __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i first_bit = _mm512_mullo_epi32(index, _mm512_set1_epi32(static_cast<int>(width)));
  const __m512i from = _mm512_srli_epi32(first_bit, 5);
  const __m512i next = _mm512_add_epi32(from, _mm512_set1_epi32(1));
  const __m512i right = _mm512_and_si512(first_bit, _mm512_set1_epi32(31));
  const __m512i left = _mm512_sub_epi32(_mm512_set1_epi32(32), right);
  const __m512i keep = _mm512_set1_epi32(static_cast<int>(low_bits(width)));
  const __m512i start = _mm512_set1_epi32(static_cast<int>(before + 1));
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(width));
  for (std::size_t j = 0; j < count; j += 16, lows += 2 * width) {
    const __m512i packed = _mm512_loadu_si512(lows);
    const __m512i low = _mm512_and_si512(
        keep, _mm512_or_si512(_mm512_srlv_epi32(_mm512_permutexvar_epi32(from, packed), right),
                              _mm512_sllv_epi32(_mm512_permutexvar_epi32(next, packed), left)));
    const __m512i bits = _mm512_loadu_si512(positions + j);
    const __m512i high = _mm512_sll_epi32(_mm512_sub_epi32(bits, index), shift);
    const __m512i number = _mm512_add_epi32(_mm512_add_epi32(start, index), _mm512_or_si512(high, low));
    index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
    const std::size_t left_over = count - j;
    const auto mask = static_cast<__mmask16>(left_over >= 16 ? 0xffffU : low_bits(left_over));
    _mm512_mask_storeu_epi32(numbers + j, mask, number);
  }
  return true;
}

constexpr Variants<DecodeFunction> kDecode{decode_portable, decode_avx2, decode_avx512};

#else

constexpr Variants<DecodeFunction> kDecode{decode_portable};

#endif

}  // namespace

bool elias_fano_decode(const std::byte* lows, const std::byte* highs, std::size_t high_bytes, std::uint32_t before,
                       unsigned width, std::span<std::uint32_t> numbers) {
  TELEGRAD_CHECK(numbers.size() <= kEliasFanoMost && width <= 31);
  return kDecode(lows, highs, high_bytes, before, width, numbers.data(), numbers.size());
}

}  // namespace telegrad::kernels
