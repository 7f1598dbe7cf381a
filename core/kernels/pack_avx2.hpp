#pragma once
// Eight elements of 32 bits at a time: those that a mask names, behind one another, and the reverse. AVX2 has no instruction for
// either, but moves lanes to wherever a table says. For the kernels' own sources; AVX2 alone.

#include "kernels/dispatch.hpp"

#ifdef TELEGRAD_KERNELS_X86
#include "kernels/intrinsics.hpp"

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

TELEGRAD_AVX2 inline __m256i load8(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
TELEGRAD_AVX2 inline void store8(void* to, __m256i lanes) { _mm256_storeu_si256(static_cast<__m256i*>(to), lanes); }

/// The first `count` of eight elements, then zeros; nothing behind them is read.
TELEGRAD_AVX2 inline __m256i load_first8(const void* from, std::size_t count) {
  const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i wanted = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), places);
  return _mm256_maskload_epi32(static_cast<const int*>(from), wanted);
}

}  // namespace telegrad::kernels

#endif
