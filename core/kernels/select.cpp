#include "kernels/select.hpp"

#include <bit>
#include <limits>

#include "base/check.hpp"
#include "kernels/arithmetic.hpp"
#include "kernels/dispatch.hpp"

#ifdef TELEGRAD_KERNELS_X86
#include <immintrin.h>
#endif

namespace telegrad::kernels {
namespace {

// What a pass reads and where it puts the survivors; `bound` is the threshold's magnitude bits.
struct Pass {
  float* residual;
  const float* gradient;
  std::size_t size;
  std::uint32_t bound;
  std::uint32_t index_offset;
  std::uint32_t* indices;
  float* values;
  std::size_t capacity;
};

using SelectFunction = std::size_t(const Pass& pass);

// A survivor found by a pass that has stored its sum in the residual already.
inline void take(const Pass& pass, std::size_t position, std::size_t& count) {
  if (count < pass.capacity) {
    pass.indices[count] = pass.index_offset + static_cast<std::uint32_t>(position);
    pass.values[count] = pass.residual[position];
    pass.residual[position] = 0.0F;
  }
  ++count;
}

void select_tail(const Pass& pass, std::size_t first, std::size_t& count) {
  for (std::size_t i = first; i < pass.size; ++i) {
    pass.residual[i] += pass.gradient[i];
    if (magnitude_bits(pass.residual[i]) >= pass.bound) take(pass, i, count);
  }
}

std::size_t select_portable(const Pass& given) {
  const Pass pass = given;  // a copy that the stores below cannot alias
  constexpr std::size_t kBlock = 32;
  std::size_t count = 0;
  std::size_t i = 0;
  for (; i + kBlock <= pass.size; i += kBlock) {
    float* const residual = pass.residual + i;
    const float* const gradient = pass.gradient + i;
    float sum[kBlock];
    std::uint32_t any = 0;  // the top bit: signed subtraction of 31-bit numbers cannot overflow
    for (std::size_t j = 0; j < kBlock; ++j) sum[j] = residual[j] + gradient[j];
    for (std::size_t j = 0; j < kBlock; ++j) residual[j] = sum[j];
    for (std::size_t j = 0; j < kBlock; ++j) any |= ~(magnitude_bits(sum[j]) - pass.bound);
    if ((any >> 31) == 0) continue;
    if (count + kBlock > pass.capacity) {
      for (std::size_t j = 0; j < kBlock; ++j) {
        if (magnitude_bits(sum[j]) >= pass.bound) take(pass, i + j, count);
      }
      continue;
    }
    for (std::size_t j = 0; j < kBlock; ++j) {  // without branches: every entry is written, the survivors stay
      const std::uint32_t below = (magnitude_bits(sum[j]) - pass.bound) >> 31;
      pass.indices[count] = pass.index_offset + static_cast<std::uint32_t>(i + j);
      pass.values[count] = sum[j];
      residual[j] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(sum[j]) & (0U - below));
      count += 1U - below;
    }
  }
  select_tail(pass, i, count);
  return count;
}

#ifdef TELEGRAD_KERNELS_X86

TELEGRAD_AVX2 inline unsigned survivors_avx2(__m256 sum, __m256i below_bound) {
  const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(sum), _mm256_set1_epi32(0x7fffffff));
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(magnitude, below_bound))));
}

TELEGRAD_AVX2 std::size_t select_avx2(const Pass& pass) {
  const __m256i below_bound = _mm256_set1_epi32(static_cast<int>(pass.bound) - 1);
  std::size_t count = 0;
  std::size_t i = 0;
  for (; i + 32 <= pass.size; i += 32) {
    unsigned survivors = 0;
    for (unsigned j = 0; j < 4; ++j) {
      float* const residual = pass.residual + i + 8 * j;
      const __m256 sum = _mm256_add_ps(_mm256_loadu_ps(residual), _mm256_loadu_ps(pass.gradient + i + 8 * j));
      _mm256_storeu_ps(residual, sum);
      survivors |= survivors_avx2(sum, below_bound) << (8 * j);
    }
    for (; survivors != 0; survivors &= survivors - 1) {
      take(pass, i + static_cast<unsigned>(std::countr_zero(survivors)), count);
    }
  }
  select_tail(pass, i, count);
  return count;
}

TELEGRAD_AVX512 inline __mmask16 survivors_avx512(__m512 sum, __m512i bound) {
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(sum), _mm512_set1_epi32(0x7fffffff));
  return _mm512_cmpge_epu32_mask(magnitude, bound);
}

// Needs room for 16: a whole register is stored, of which popcount(survivors) lanes count.
TELEGRAD_AVX512 inline void pack_avx512(const Pass& pass, std::size_t i, __m512 sum, __mmask16 survivors,
                                        std::size_t& count) {
  const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto first = static_cast<int>(pass.index_offset + static_cast<std::uint32_t>(i));
  const __m512i positions = _mm512_add_epi32(iota, _mm512_set1_epi32(first));
  _mm512_storeu_ps(pass.values + count, _mm512_maskz_compress_ps(survivors, sum));
  _mm512_storeu_si512(pass.indices + count, _mm512_maskz_compress_epi32(survivors, positions));
  _mm512_mask_storeu_ps(pass.residual + i, survivors, _mm512_setzero_ps());
  count += static_cast<std::size_t>(std::popcount(static_cast<unsigned>(survivors)));
}

TELEGRAD_AVX512 std::size_t select_avx512(const Pass& given) {
  const Pass pass = given;
  const __m512i bound = _mm512_set1_epi32(static_cast<int>(pass.bound));
  std::size_t count = 0;
  std::size_t i = 0;
  for (; i + 32 <= pass.size; i += 32) {
    float* const residual = pass.residual + i;
    const float* const gradient = pass.gradient + i;
    const __m512 low = _mm512_add_ps(_mm512_loadu_ps(residual), _mm512_loadu_ps(gradient));
    const __m512 high = _mm512_add_ps(_mm512_loadu_ps(residual + 16), _mm512_loadu_ps(gradient + 16));
    _mm512_storeu_ps(residual, low);
    _mm512_storeu_ps(residual + 16, high);
    const __mmask16 low_survivors = survivors_avx512(low, bound);
    const __mmask16 high_survivors = survivors_avx512(high, bound);
    std::uint32_t survivors = static_cast<std::uint32_t>(high_survivors) << 16 | low_survivors;
    if (survivors == 0) continue;
    if (count + 32 <= pass.capacity) {
      pack_avx512(pass, i, low, low_survivors, count);
      pack_avx512(pass, i + 16, high, high_survivors, count);
      continue;
    }
    for (; survivors != 0; survivors &= survivors - 1) {
      take(pass, i + static_cast<unsigned>(std::countr_zero(survivors)), count);
    }
  }
  select_tail(pass, i, count);
  return count;
}

constexpr Variants<SelectFunction> kSelect{select_portable, select_avx2, select_avx512};

#else

constexpr Variants<SelectFunction> kSelect{select_portable};

#endif

Pass checked_pass(std::span<float> residual, std::span<const float> gradient, float threshold,
                  std::uint32_t index_offset, std::span<std::uint32_t> indices, std::span<float> values) {
  TELEGRAD_CHECK(residual.size() == gradient.size() && indices.size() == values.size());
  TELEGRAD_CHECK(residual.size() + index_offset <= std::uint64_t{1} << 32);
  return {.residual = residual.data(),
          .gradient = gradient.data(),
          .size = residual.size(),
          .bound = threshold <= 0.0F ? 0U : magnitude_bits(threshold),
          .index_offset = index_offset,
          .indices = indices.data(),
          .values = values.data(),
          .capacity = indices.size()};
}

}  // namespace

std::size_t accumulate_select(std::span<float> residual, std::span<const float> gradient, float threshold,
                              std::uint32_t index_offset, std::span<std::uint32_t> indices, std::span<float> values) {
  const Pass pass = checked_pass(residual, gradient, threshold, index_offset, indices, values);
  return kSelect(pass);
}

namespace reference {

std::size_t accumulate_select(std::span<float> residual, std::span<const float> gradient, float threshold,
                              std::uint32_t index_offset, std::span<std::uint32_t> indices, std::span<float> values) {
  std::size_t count = 0;
  select_tail(checked_pass(residual, gradient, threshold, index_offset, indices, values), 0, count);
  return count;
}

}  // namespace reference

}  // namespace telegrad::kernels
