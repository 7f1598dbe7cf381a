#pragma once
// Keys of 8 or 16 entries at a time. For the kernels' own sources.

#include "kernels/dispatch.hpp"
#include "kernels/key.hpp"

#ifdef TELEGRAD_KERNELS_X86
#include "kernels/intrinsics.hpp"

namespace telegrad::kernels {

TELEGRAD_AVX2 inline __m256i keys_avx2(__m256 values, KeyBits key) {
  const __m256i flipped = _mm256_xor_si256(_mm256_castps_si256(values), _mm256_set1_epi32(static_cast<int>(key.flip)));
  return _mm256_and_si256(flipped, _mm256_set1_epi32(static_cast<int>(key.mask)));
}

/// A bit for every key that is greater than its neighbour in `than`.
TELEGRAD_AVX2 inline unsigned above_avx2(__m256i keys, __m256i than) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(keys, than))));
}

/// `flip` and `mask`: those of the KeyBits, in every lane.
TELEGRAD_AVX512 inline __m512i keys_avx512(__m512 values, __m512i flip, __m512i mask) {
  return _mm512_ternarylogic_epi32(_mm512_castps_si512(values), flip, mask, 0x28);  // (values ^ flip) & mask
}

}  // namespace telegrad::kernels

#endif
