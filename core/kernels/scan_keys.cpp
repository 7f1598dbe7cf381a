#include "kernels/scan_keys.hpp"

#include <bit>

#include "base/check.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/key_vectors.hpp"

namespace telegrad::kernels {
namespace {

using CountFunction = std::size_t(std::span<const float> x, std::int32_t bound, KeyBits key);

// A key is inside where key - first, unsigned, is at most last - first: a negative key is beyond every width.
struct Range {
  std::uint32_t first;
  std::uint32_t width;
  KeyBits key;

  bool holds(float x) const { return static_cast<std::uint32_t>(key(x)) - first <= width; }
};

using CollectFunction = std::size_t(std::span<const float> x, const Range& range, std::int32_t* out, std::size_t most);

std::size_t count_tail(std::span<const float> x, std::size_t begin, std::int32_t bound, KeyBits key) {
  std::size_t count = 0;
  for (std::size_t i = begin; i < x.size(); ++i) count += key(x[i]) >= bound ? 1 : 0;
  return count;
}

std::size_t count_portable(std::span<const float> x, std::int32_t bound, KeyBits key) {
  constexpr std::size_t kBlock = 1024;
  std::size_t count = 0;
  std::size_t i = 0;
  for (; i + kBlock <= x.size(); i += kBlock) {
    std::uint32_t in_block = 0;  // of the keys' own width, so that the loop is vectorised
    for (std::size_t j = i; j < i + kBlock; ++j) in_block += key(x[j]) >= bound ? 1U : 0U;
    count += in_block;
  }
  return count + count_tail(x, i, bound, key);
}

std::size_t collect_tail(std::span<const float> x, std::size_t begin, const Range& range, std::int32_t* out,
                         std::size_t most, std::size_t count) {
  for (std::size_t i = begin; i < x.size() && count <= most; ++i) {
    out[count] = range.key(x[i]);
    count += range.holds(x[i]) ? 1 : 0;
  }
  return count;
}

std::size_t collect_portable(std::span<const float> x, const Range& range, std::int32_t* out, std::size_t most) {
  constexpr std::size_t kBlock = kCollectSlack;
  const Range own = range;  // a copy that the stores below cannot alias
  std::size_t count = 0;
  std::size_t i = 0;
  for (; i + kBlock <= x.size() && count <= most; i += kBlock) {
    std::uint32_t any = 0;
    for (std::size_t j = i; j < i + kBlock; ++j) any |= own.holds(x[j]) ? 1U : 0U;
    if (any == 0) continue;
    for (std::size_t j = i; j < i + kBlock; ++j) {
      out[count] = own.key(x[j]);
      count += own.holds(x[j]) ? 1 : 0;
    }
  }
  return collect_tail(x, i, own, out, most, count);
}

#ifdef TELEGRAD_KERNELS_X86

TELEGRAD_AVX2 std::size_t count_avx2(std::span<const float> x, std::int32_t bound, KeyBits key) {
  const __m256i below_bound = _mm256_set1_epi32(bound - 1);
  std::size_t count = 0;
  std::size_t i = 0;
  for (; i + 32 <= x.size(); i += 32) {
    unsigned above = 0;
    for (unsigned j = 0; j < 4; ++j) {
      above |= above_avx2(keys_avx2(_mm256_loadu_ps(x.data() + i + 8 * j), key), below_bound) << (8 * j);
    }
    count += static_cast<std::size_t>(std::popcount(above));
  }
  return count + count_tail(x, i, bound, key);
}

TELEGRAD_AVX2 std::size_t collect_avx2(std::span<const float> x, const Range& range, std::int32_t* out,
                                       std::size_t most) {
  const __m256i below = _mm256_set1_epi32(static_cast<int>(range.first) - 1);  // signed order: no bound is negative
  const __m256i last = _mm256_set1_epi32(static_cast<int>(range.first + range.width));
  std::size_t count = 0;
  std::size_t i = 0;
  for (; i + 32 <= x.size() && count <= most; i += 32) {
    unsigned inside = 0;
    for (unsigned j = 0; j < 4; ++j) {
      const __m256i keys = keys_avx2(_mm256_loadu_ps(x.data() + i + 8 * j), range.key);
      inside |= (above_avx2(keys, below) & ~above_avx2(keys, last)) << (8 * j);
    }
    for (; inside != 0; inside &= inside - 1) {
      out[count++] = range.key(x[i + static_cast<unsigned>(std::countr_zero(inside))]);
    }
  }
  return collect_tail(x, i, range, out, most, count);
}

TELEGRAD_AVX512 std::size_t count_avx512(std::span<const float> x, std::int32_t bound, KeyBits key) {
  const __m512i least = _mm512_set1_epi32(bound);
  const __m512i flip = _mm512_set1_epi32(static_cast<int>(key.flip));
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(key.mask));
  std::size_t count = 0;
  std::size_t i = 0;
  for (; i + 32 <= x.size(); i += 32) {
    const __m512i low = keys_avx512(_mm512_loadu_ps(x.data() + i), flip, mask);
    const __m512i high = keys_avx512(_mm512_loadu_ps(x.data() + i + 16), flip, mask);
    const unsigned low_above = _mm512_cmpge_epi32_mask(low, least);
    const unsigned high_above = _mm512_cmpge_epi32_mask(high, least);
    count += static_cast<std::size_t>(std::popcount(high_above << 16 | low_above));
  }
  return count + count_tail(x, i, bound, key);
}

TELEGRAD_AVX512 std::size_t collect_avx512(std::span<const float> x, const Range& range, std::int32_t* out,
                                           std::size_t most) {
  const __m512i flip = _mm512_set1_epi32(static_cast<int>(range.key.flip));
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(range.key.mask));
  const __m512i first = _mm512_set1_epi32(static_cast<int>(range.first));
  const __m512i width = _mm512_set1_epi32(static_cast<int>(range.width));
  std::size_t count = 0;
  std::size_t i = 0;
  for (; i + 32 <= x.size() && count <= most; i += 32) {
    const __m512i low = keys_avx512(_mm512_loadu_ps(x.data() + i), flip, mask);
    const __m512i high = keys_avx512(_mm512_loadu_ps(x.data() + i + 16), flip, mask);
    const __mmask16 low_in = _mm512_cmple_epu32_mask(_mm512_sub_epi32(low, first), width);
    const __mmask16 high_in = _mm512_cmple_epu32_mask(_mm512_sub_epi32(high, first), width);
    if ((low_in | high_in) == 0) continue;
    _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi32(low_in, low));
    count += static_cast<std::size_t>(std::popcount(static_cast<unsigned>(low_in)));
    _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi32(high_in, high));
    count += static_cast<std::size_t>(std::popcount(static_cast<unsigned>(high_in)));
  }
  return collect_tail(x, i, range, out, most, count);
}

constexpr Variants<CountFunction> kCount{count_portable, count_avx2, count_avx512};
constexpr Variants<CollectFunction> kCollect{collect_portable, collect_avx2, collect_avx512};

#else

constexpr Variants<CountFunction> kCount{count_portable};
constexpr Variants<CollectFunction> kCollect{collect_portable};

#endif

Range checked_range(std::int32_t first, std::int32_t last, Side side, std::span<std::int32_t> out, std::size_t most) {
  TELEGRAD_CHECK(first >= 0 && first <= last);
  TELEGRAD_CHECK(out.size() >= most + kCollectSlack);
  return {static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(last - first), KeyBits(side)};
}

}  // namespace

std::size_t count_at_least(std::span<const float> x, std::int32_t bound, Side side) {
  return kCount(x, bound, KeyBits(side));
}

std::size_t collect_keys(std::span<const float> x, std::int32_t first, std::int32_t last, Side side,
                         std::span<std::int32_t> out, std::size_t most) {
  return kCollect(x, checked_range(first, last, side, out, most), out.data(), most);
}

namespace reference {

std::size_t count_at_least(std::span<const float> x, std::int32_t bound, Side side) {
  return count_tail(x, 0, bound, KeyBits(side));
}

std::size_t collect_keys(std::span<const float> x, std::int32_t first, std::int32_t last, Side side,
                         std::span<std::int32_t> out, std::size_t most) {
  return collect_tail(x, 0, checked_range(first, last, side, out, most), out.data(), most, 0);
}

}  // namespace reference

}  // namespace telegrad::kernels
