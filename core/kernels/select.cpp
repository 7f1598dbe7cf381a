#include "kernels/select.hpp"

#include <array>
#include <bit>

#include "base/check.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/key_vectors.hpp"

namespace telegrad::kernels {
namespace {

// What a pass reads and where it puts the survivors, those of at least the key `bound`.
struct Pass {
  float* residual;
  const float* before;    // to which the gradient is added: the residual, or what it was
  const float* gradient;  // null: nothing is added
  std::size_t size;
  KeyBits key;
  std::int32_t bound;
  std::uint32_t index_offset;
  std::uint32_t* indices;
  float* values;
  std::size_t capacity;
};

struct Gathered {
  alignas(64) std::array<double, 16> sums{};
  std::size_t above_zero = 0;
  std::int32_t highest_key = 0;
  std::uint32_t largest = 0;  // magnitude bits
};

using SelectFunction = std::size_t(const Pass& pass, Gathered* gathered);

// Up to this many elements are looked at together; a multiple of the lanes of a sum.
constexpr std::size_t kBlock = 32;

// Where there are survivors cannot be predicted: at a density of 1 % a branch for each block is wrong in one of four, and
// costs as much as all else. So blocks with survivors are listed without one, and packed while they are in the nearest
// cache.
constexpr std::size_t kListed = 4096;

// Elements between those that are added and those that are fetched: the CPU itself fetches nothing beyond the end of a page
// of 4 KiB, and begins slowly in the next one. A prefetch beyond the end of an array does nothing.
constexpr std::size_t kAhead = 512;

inline void prefetch_block(const Pass& pass, std::size_t first) {
  constexpr std::size_t kLine = 64 / sizeof(float);
  for (std::size_t i = first + kAhead; i < first + kAhead + kBlock; i += kLine) {
    __builtin_prefetch(pass.before + i);
    __builtin_prefetch(pass.gradient + i);
    if (pass.residual != pass.before) __builtin_prefetch(pass.residual + i, 1);
  }
}

void gather(Gathered& gathered, KeyBits key, float sum, std::size_t position) {
  const std::int32_t own = key(sum);
  gathered.sums[position % 16] += static_cast<double>(std::bit_cast<float>(std::max(own, 0)));
  gathered.above_zero += own > 0 ? 1 : 0;
  gathered.highest_key = std::max(gathered.highest_key, own);
  gathered.largest = std::max(gathered.largest, magnitude_bits(sum));
}

// A survivor found by a pass that has stored its sum in the residual already.
inline void take(const Pass& pass, std::size_t position, std::size_t& count) {
  if (count < pass.capacity) {
    pass.indices[count] = pass.index_offset + static_cast<std::uint32_t>(position);
    pass.values[count] = pass.residual[position];
    pass.residual[position] = 0.0F;
  }
  ++count;
}

template <bool adds, bool gathers>
void select_tail(const Pass& pass, std::size_t first, std::size_t& count, Gathered* gathered) {
  for (std::size_t i = first; i < pass.size; ++i) {
    if constexpr (adds) pass.residual[i] = pass.before[i] + pass.gradient[i];
    if constexpr (gathers) gather(*gathered, pass.key, pass.residual[i], i);
    if (pass.key(pass.residual[i]) >= pass.bound) take(pass, i, count);
  }
}

// What is gathered, in lanes, so that the compiler can vectorise it.
struct Lanes {
  std::array<double, 16> sums{};
  std::array<std::int32_t, 16> highest{}, largest{};
  std::size_t above_zero = 0;
};

void gather_block(Lanes& lanes, const float* sums, const std::int32_t* keys) {
  std::int32_t above_zero = 0;
  for (std::size_t begin = 0; begin < kBlock; begin += 16) {
    float clamped[16];
    for (std::size_t j = 0; j < 16; ++j) {  // max(key, 0), which the compiler would make a branch
      clamped[j] = std::bit_cast<float>(keys[begin + j] & ~(keys[begin + j] >> 31));
    }
    for (std::size_t j = 0; j < 16; ++j) lanes.sums[j] += static_cast<double>(clamped[j]);
    for (std::size_t j = 0; j < 16; ++j) lanes.highest[j] = std::max(lanes.highest[j], keys[begin + j]);
    for (std::size_t j = 0; j < 16; ++j) {
      lanes.largest[j] = std::max(lanes.largest[j], std::bit_cast<std::int32_t>(sums[begin + j]) & kHighestKey);
    }
  }
  for (std::size_t j = 0; j < kBlock; ++j) above_zero += keys[j] > 0 ? 1 : 0;
  lanes.above_zero += static_cast<std::size_t>(above_zero);
}

template <bool adds, bool gathers>
std::size_t select_portable(const Pass& given, Gathered* gathered) {
  const Pass pass = given;  // a copy that the stores below cannot alias
  Lanes lanes;
  std::size_t count = 0;
  std::size_t i = 0;
  for (; i + kBlock <= pass.size; i += kBlock) {
    float* const residual = pass.residual + i;
    float sum[kBlock];
    std::int32_t keys[kBlock];
    if constexpr (adds) prefetch_block(pass, i);
    for (std::size_t j = 0; j < kBlock; ++j) sum[j] = pass.before[i + j];
    if constexpr (adds) {
      for (std::size_t j = 0; j < kBlock; ++j) sum[j] += pass.gradient[i + j];
      for (std::size_t j = 0; j < kBlock; ++j) residual[j] = sum[j];
    }
    std::uint32_t any = 0;
    for (std::size_t j = 0; j < kBlock; ++j) keys[j] = pass.key(sum[j]);
    for (std::size_t j = 0; j < kBlock; ++j) any |= keys[j] >= pass.bound ? 1U : 0U;
    if constexpr (gathers) gather_block(lanes, sum, keys);
    if (any == 0) continue;
    if (count + kBlock > pass.capacity) {
      for (std::size_t j = 0; j < kBlock; ++j) {
        if (keys[j] >= pass.bound) take(pass, i + j, count);
      }
      continue;
    }
    for (std::size_t j = 0; j < kBlock; ++j) {  // without branches: every entry is written, the survivors stay
      const std::uint32_t below = keys[j] >= pass.bound ? 0U : 1U;
      pass.indices[count] = pass.index_offset + static_cast<std::uint32_t>(i + j);
      pass.values[count] = sum[j];
      residual[j] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(sum[j]) & (0U - below));
      count += 1U - below;
    }
  }
  if constexpr (gathers) {
    gathered->sums = lanes.sums;
    gathered->above_zero = lanes.above_zero;
    gathered->highest_key = *std::max_element(lanes.highest.begin(), lanes.highest.end());
    gathered->largest = static_cast<std::uint32_t>(*std::max_element(lanes.largest.begin(), lanes.largest.end()));
  }
  select_tail<adds, gathers>(pass, i, count, gathered);
  return count;
}

#ifdef TELEGRAD_KERNELS_X86

TELEGRAD_AVX2 inline void add_lanes_avx2(double* lanes, __m256i clamped) {
  const __m256 values = _mm256_castsi256_ps(clamped);
  const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(values));
  const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
  _mm256_store_pd(lanes, _mm256_add_pd(_mm256_load_pd(lanes), low));
  _mm256_store_pd(lanes + 4, _mm256_add_pd(_mm256_load_pd(lanes + 4), high));
}

template <bool adds, bool gathers>
TELEGRAD_AVX2 std::size_t select_avx2(const Pass& given, Gathered* gathered) {
  const Pass pass = given;
  const __m256i below_bound = _mm256_set1_epi32(pass.bound - 1);
  const __m256i zero = _mm256_setzero_si256();
  __m256i highest = zero, largest = zero;
  std::array<std::uint32_t, kListed / kBlock + 1> positions, masks;
  std::size_t count = 0;
  std::size_t i = 0;
  const std::size_t whole = pass.size / kBlock * kBlock;
  while (i < whole) {
    const std::size_t end = std::min(i + kListed, whole);
    std::size_t listed = 0;
    for (; i < end; i += kBlock) {
      if constexpr (adds) prefetch_block(pass, i);
      unsigned survivors = 0, above_zero = 0;
      for (unsigned j = 0; j < 4; ++j) {
        float* const residual = pass.residual + i + 8 * j;
        __m256 sum = _mm256_loadu_ps(pass.before + i + 8 * j);
        if constexpr (adds) {
          sum = _mm256_add_ps(sum, _mm256_loadu_ps(pass.gradient + i + 8 * j));
          _mm256_storeu_ps(residual, sum);
        }
        const __m256i keys = keys_avx2(sum, pass.key);
        survivors |= above_avx2(keys, below_bound) << (8 * j);
        if constexpr (gathers) {
          above_zero |= above_avx2(keys, zero) << (8 * j);
          highest = _mm256_max_epi32(highest, keys);
          largest = _mm256_max_epi32(
              largest, _mm256_and_si256(_mm256_castps_si256(sum), _mm256_set1_epi32(kHighestKey)));
          add_lanes_avx2(gathered->sums.data() + 8 * (j % 2), _mm256_max_epi32(keys, zero));
        }
      }
      if constexpr (gathers) gathered->above_zero += static_cast<std::size_t>(std::popcount(above_zero));
      positions[listed] = static_cast<std::uint32_t>(i);
      masks[listed] = survivors;
      listed += survivors != 0 ? 1 : 0;
    }
    for (std::size_t j = 0; j < listed; ++j) {
      for (unsigned survivors = masks[j]; survivors != 0; survivors &= survivors - 1) {
        take(pass, positions[j] + static_cast<unsigned>(std::countr_zero(survivors)), count);
      }
    }
  }
  if constexpr (gathers) {
    alignas(32) std::array<std::int32_t, 8> lanes;
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.data()), highest);
    gathered->highest_key = *std::max_element(lanes.begin(), lanes.end());
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.data()), largest);
    gathered->largest = static_cast<std::uint32_t>(*std::max_element(lanes.begin(), lanes.end()));
  }
  select_tail<adds, gathers>(pass, i, count, gathered);
  return count;
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
  count += static_cast<std::size_t>(std::popcount(_cvtmask16_u32(survivors)));
}

struct Gathering {
  __m512d low, high;  // lanes 0 to 7 and 8 to 15 of the sum
  __m512i highest, largest;
};

// With masks that leave nothing out where GCC 12 warns of the variants without.
TELEGRAD_AVX512 inline unsigned gather_avx512(Gathering& found, __m512 sum, __m512i keys) {
  constexpr __mmask16 kAll = 0xffff;
  const __m512i clamped = _mm512_maskz_max_epi32(kAll, keys, _mm512_setzero_si512());
  const __m256i low = _mm512_maskz_extracti64x4_epi64(0xff, clamped, 0);
  const __m256i high = _mm512_maskz_extracti64x4_epi64(0xff, clamped, 1);
  found.low = _mm512_add_pd(found.low, _mm512_maskz_cvtps_pd(0xff, _mm256_castsi256_ps(low)));
  found.high = _mm512_add_pd(found.high, _mm512_maskz_cvtps_pd(0xff, _mm256_castsi256_ps(high)));
  found.highest = _mm512_maskz_max_epi32(kAll, found.highest, keys);
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(sum), _mm512_set1_epi32(kHighestKey));
  found.largest = _mm512_maskz_max_epi32(kAll, found.largest, magnitude);
  return _cvtmask16_u32(_mm512_cmpgt_epi32_mask(keys, _mm512_setzero_si512()));
}

template <bool adds, bool gathers>
TELEGRAD_AVX512 std::size_t select_avx512(const Pass& given, Gathered* gathered) {
  const Pass pass = given;
  const __m512i bound = _mm512_set1_epi32(pass.bound);
  const __m512i flip = _mm512_set1_epi32(static_cast<int>(pass.key.flip));
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(pass.key.mask));
  Gathering found{_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  std::size_t above_zero = 0;
  std::array<std::uint32_t, kListed / 16 + 2> positions;
  std::size_t count = 0;
  std::size_t i = 0;
  const std::size_t whole = pass.size / kBlock * kBlock;
  while (i < whole) {
    const std::size_t end = std::min(i + kListed, whole);
    std::size_t listed = 0;
    for (; i < end; i += kBlock) {
      if constexpr (adds) prefetch_block(pass, i);
      float* const residual = pass.residual + i;
      __m512 low = _mm512_loadu_ps(pass.before + i);
      __m512 high = _mm512_loadu_ps(pass.before + i + 16);
      if constexpr (adds) {
        const float* const gradient = pass.gradient + i;
        low = _mm512_add_ps(low, _mm512_loadu_ps(gradient));
        high = _mm512_add_ps(high, _mm512_loadu_ps(gradient + 16));
        _mm512_storeu_ps(residual, low);
        _mm512_storeu_ps(residual + 16, high);
      }
      const __m512i low_keys = keys_avx512(low, flip, mask);
      const __m512i high_keys = keys_avx512(high, flip, mask);
      if constexpr (gathers) {
        const unsigned low_above = gather_avx512(found, low, low_keys);
        const unsigned high_above = gather_avx512(found, high, high_keys);
        above_zero += static_cast<std::size_t>(std::popcount(high_above << 16 | low_above));
      }
      positions[listed] = static_cast<std::uint32_t>(i);
      listed += _cvtmask16_u32(_mm512_cmpge_epi32_mask(low_keys, bound)) != 0 ? 1 : 0;
      positions[listed] = static_cast<std::uint32_t>(i) + 16;
      listed += _cvtmask16_u32(_mm512_cmpge_epi32_mask(high_keys, bound)) != 0 ? 1 : 0;
    }
    for (std::size_t j = 0; j < listed; ++j) {
      const std::size_t at = positions[j];
      const __m512 sums = _mm512_loadu_ps(pass.residual + at);
      const __mmask16 reach = _mm512_cmpge_epi32_mask(keys_avx512(sums, flip, mask), bound);
      if (count + 16 <= pass.capacity) {
        pack_avx512(pass, at, sums, reach, count);
        continue;
      }
      for (std::uint32_t survivors = _cvtmask16_u32(reach); survivors != 0; survivors &= survivors - 1) {
        take(pass, at + static_cast<unsigned>(std::countr_zero(survivors)), count);
      }
    }
  }
  if constexpr (gathers) {
    _mm512_store_pd(gathered->sums.data(), found.low);
    _mm512_store_pd(gathered->sums.data() + 8, found.high);
    alignas(64) std::array<std::int32_t, 16> lanes;
    _mm512_store_si512(lanes.data(), found.highest);
    gathered->highest_key = *std::max_element(lanes.begin(), lanes.end());
    _mm512_store_si512(lanes.data(), found.largest);
    gathered->largest = static_cast<std::uint32_t>(*std::max_element(lanes.begin(), lanes.end()));
    gathered->above_zero = above_zero;
  }
  select_tail<adds, gathers>(pass, i, count, gathered);
  return count;
}

template <bool adds, bool gathers>
constexpr Variants<SelectFunction> kSelect{select_portable<adds, gathers>, select_avx2<adds, gathers>,
                                           select_avx512<adds, gathers>};

#else

template <bool adds, bool gathers>
constexpr Variants<SelectFunction> kSelect{select_portable<adds, gathers>};

#endif

Pass checked_pass(std::span<float> residual, std::span<const float> gradient, std::int32_t bound, Side side,
                  std::uint32_t index_offset, EntriesOut<float> out, std::span<const float> before) {
  TELEGRAD_CHECK(residual.size() == gradient.size() || gradient.empty());
  TELEGRAD_CHECK(before.empty() || (before.size() == residual.size() && !gradient.empty()));
  TELEGRAD_CHECK(out.indices.size() == out.values.size());
  TELEGRAD_CHECK(residual.size() + index_offset <= std::uint64_t{1} << 32);
  TELEGRAD_CHECK(bound >= 0);
  return {.residual = residual.data(),
          .before = before.empty() ? residual.data() : before.data(),
          .gradient = gradient.data(),
          .size = residual.size(),
          .key = KeyBits(side),
          .bound = std::max(bound, lowest_key(side)),
          .index_offset = index_offset,
          .indices = out.indices.data(),
          .values = out.values.data(),
          .capacity = out.indices.size()};
}

Moments moments_of(Gathered& gathered, std::size_t size, Side side) {
  for (std::size_t width = 8; width != 0; width /= 2) {
    for (std::size_t lane = 0; lane < width; ++lane) gathered.sums[lane] += gathered.sums[lane + width];
  }
  return {.count = side == Side::both ? size : gathered.above_zero,
          .sum = gathered.sums[0],
          .max = std::bit_cast<float>(gathered.highest_key),
          .largest = std::bit_cast<float>(gathered.largest)};
}

}  // namespace

std::size_t accumulate_select(std::span<float> residual, std::span<const float> gradient, std::int32_t bound, Side side,
                              std::uint32_t index_offset, EntriesOut<float> out, Moments* moments,
                              std::span<const float> before) {
  const Pass pass = checked_pass(residual, gradient, bound, side, index_offset, out, before);
  Gathered gathered;
  Gathered* const into = &gathered;
  if (moments == nullptr) return gradient.empty() ? kSelect<false, false>(pass, into) : kSelect<true, false>(pass, into);
  const std::size_t count = gradient.empty() ? kSelect<false, true>(pass, into) : kSelect<true, true>(pass, into);
  *moments = moments_of(gathered, residual.size(), side);
  return count;
}

Moments accumulate_moments(std::span<float> residual, std::span<const float> gradient, Side side) {
  Moments moments;
  accumulate_select(residual, gradient, kHighestKey, side, 0, {}, &moments);
  return moments;
}

namespace reference {

std::size_t accumulate_select(std::span<float> residual, std::span<const float> gradient, std::int32_t bound, Side side,
                              std::uint32_t index_offset, EntriesOut<float> out, Moments* moments,
                              std::span<const float> before) {
  const Pass pass = checked_pass(residual, gradient, bound, side, index_offset, out, before);
  const auto select = gradient.empty() ? select_tail<false, true> : select_tail<true, true>;
  std::size_t count = 0;
  Gathered gathered;
  select(pass, 0, count, &gathered);
  if (moments != nullptr) *moments = moments_of(gathered, residual.size(), side);
  return count;
}

}  // namespace reference

}  // namespace telegrad::kernels
