// The exact threshold of a top-k. A random sample gives a bound that a little more than k magnitudes should reach; one
// pass at memory speed collects those, and a radix select finishes among the few. Where the sample misled (too few
// or too many collected), or k is a large share, the radix select goes over everything: the answer is the same.

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "kernels/arithmetic.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/select.hpp"

#ifdef TELEGRAD_KERNELS_X86
#include <immintrin.h>
#endif

namespace telegrad::kernels {
namespace {

// A collecting pass stores whole registers: its output needs this much more than the entries it may keep.
constexpr std::size_t kSlack = 32;
constexpr unsigned kTopBits = 11;  // exponent and three bits of the mantissa
constexpr unsigned kRestBits = 10;
constexpr std::size_t kSmall = std::size_t{1} << 15;   // below, sampling costs more than it saves
constexpr std::size_t kSample = std::size_t{1} << 13;

/// The magnitudes m with first <= m <= last, in order. Stops early and returns more than `most` when there are more.
using CollectFunction = std::size_t(std::span<const float> x, std::uint32_t first, std::uint32_t last,
                                    std::uint32_t* out, std::size_t most);

void collect_tail(std::span<const float> x, std::size_t begin, std::uint32_t first, std::uint32_t last,
                  std::uint32_t* out, std::size_t most, std::size_t& count) {
  for (std::size_t i = begin; i < x.size() && count <= most; ++i) {
    const std::uint32_t magnitude = magnitude_bits(x[i]);
    out[count] = magnitude;
    count += magnitude - first <= last - first ? 1 : 0;
  }
}

std::size_t collect_portable(std::span<const float> x, std::uint32_t first, std::uint32_t last, std::uint32_t* out,
                             std::size_t most) {
  constexpr std::size_t kBlock = 32;
  std::size_t count = 0;
  std::size_t i = 0;
  for (; i + kBlock <= x.size() && count <= most; i += kBlock) {
    std::uint32_t outside = ~0U;  // the top bit survives when all are outside
    for (std::size_t j = i; j < i + kBlock; ++j) {
      outside &= (magnitude_bits(x[j]) - first) | (last - magnitude_bits(x[j]));
    }
    if ((outside >> 31) != 0) continue;
    for (std::size_t j = i; j < i + kBlock; ++j) {
      const std::uint32_t magnitude = magnitude_bits(x[j]);
      out[count] = magnitude;  // kBlock <= kSlack
      count += magnitude - first <= last - first ? 1 : 0;
    }
  }
  collect_tail(x, i, first, last, out, most, count);
  return count;
}

#ifdef TELEGRAD_KERNELS_X86

TELEGRAD_AVX2 std::size_t collect_avx2(std::span<const float> x, std::uint32_t first, std::uint32_t last,
                                       std::uint32_t* out, std::size_t most) {
  const __m256i below = _mm256_set1_epi32(static_cast<int>(first) - 1);
  const __m256i above = _mm256_set1_epi32(static_cast<int>(last));  // a magnitude has 31 bits: signed order is right
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  std::size_t count = 0;
  std::size_t i = 0;
  for (; i + 32 <= x.size() && count <= most; i += 32) {
    unsigned inside = 0;
    for (unsigned j = 0; j < 4; ++j) {
      const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x.data() + i + 8 * j));
      const __m256i magnitude = _mm256_and_si256(word, mask);
      const __m256i beyond = _mm256_cmpgt_epi32(magnitude, above);
      const __m256i in = _mm256_andnot_si256(beyond, _mm256_cmpgt_epi32(magnitude, below));
      inside |= static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(in))) << (8 * j);
    }
    for (; inside != 0; inside &= inside - 1) {
      out[count++] = magnitude_bits(x[i + static_cast<unsigned>(std::countr_zero(inside))]);
    }
  }
  collect_tail(x, i, first, last, out, most, count);
  return count;
}

TELEGRAD_AVX512 std::size_t collect_avx512(std::span<const float> x, std::uint32_t first, std::uint32_t last,
                                           std::uint32_t* out, std::size_t most) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const __m512i lowest = _mm512_set1_epi32(static_cast<int>(first));
  const __m512i width = _mm512_set1_epi32(static_cast<int>(last - first));
  std::size_t count = 0;
  std::size_t i = 0;
  for (; i + 32 <= x.size() && count <= most; i += 32) {
    const __m512i low = _mm512_and_si512(_mm512_loadu_si512(x.data() + i), mask);
    const __m512i high = _mm512_and_si512(_mm512_loadu_si512(x.data() + i + 16), mask);
    const __mmask16 low_in = _mm512_cmple_epu32_mask(_mm512_sub_epi32(low, lowest), width);
    const __mmask16 high_in = _mm512_cmple_epu32_mask(_mm512_sub_epi32(high, lowest), width);
    if ((low_in | high_in) == 0) continue;
    _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi32(low_in, low));
    count += static_cast<std::size_t>(std::popcount(static_cast<unsigned>(low_in)));
    _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi32(high_in, high));
    count += static_cast<std::size_t>(std::popcount(static_cast<unsigned>(high_in)));
  }
  collect_tail(x, i, first, last, out, most, count);
  return count;
}

constexpr Variants<CollectFunction> kCollect{collect_portable, collect_avx2, collect_avx512};

#else

constexpr Variants<CollectFunction> kCollect{collect_portable};

#endif

struct Bin {
  std::uint32_t digit;
  std::size_t k;     // rank of the answer among the bin's own entries
  std::size_t size;
};

// The bin in which the k-th largest lies, seen from the top.
template <std::size_t kBins>
Bin bin_of_kth(const std::array<std::uint32_t, kBins>& histogram, std::size_t k) {
  for (std::size_t digit = kBins; digit-- > 0;) {
    if (k <= histogram[digit]) return {static_cast<std::uint32_t>(digit), k, histogram[digit]};
    k -= histogram[digit];
  }
  TELEGRAD_CHECK(!"the histogram holds fewer than k entries");
  return {};
}

// Magnitudes of gradients crowd into few bins: four histograms in turn, so that no increment waits for the one before.
Bin top_bin(std::span<const float> x, std::size_t k) {
  constexpr std::size_t kBins = std::size_t{1} << kTopBits;
  std::vector<std::array<std::uint32_t, kBins>> parts(4);
  const std::size_t whole = x.size() / 4 * 4;
  for (std::size_t i = 0; i < whole; i += 4) {
    for (std::size_t j = 0; j < 4; ++j) ++parts[j][magnitude_bits(x[i + j]) >> (2 * kRestBits)];
  }
  for (std::size_t i = whole; i < x.size(); ++i) ++parts[0][magnitude_bits(x[i]) >> (2 * kRestBits)];
  for (std::size_t digit = 0; digit < kBins; ++digit) {
    parts[0][digit] += parts[1][digit] + parts[2][digit] + parts[3][digit];
  }
  return bin_of_kth(parts[0], k);
}

// Keeps, in place, the magnitudes whose digit of `bits` bits at `shift` is that of the k-th largest.
template <unsigned bits>
Bin narrow_to_digit(std::span<std::uint32_t> magnitudes, unsigned shift, std::size_t k) {
  constexpr std::uint32_t kDigit = (1U << bits) - 1U;
  std::array<std::uint32_t, std::size_t{1} << bits> histogram{};
  for (const std::uint32_t magnitude : magnitudes) ++histogram[(magnitude >> shift) & kDigit];
  const Bin bin = bin_of_kth(histogram, k);
  std::size_t kept = 0;
  for (const std::uint32_t magnitude : magnitudes) {
    magnitudes[kept] = magnitude;
    kept += ((magnitude >> shift) & kDigit) == bin.digit ? 1 : 0;
  }
  return bin;
}

// Among magnitudes that agree in their top digit.
std::uint32_t select_rest(std::span<std::uint32_t> magnitudes, std::size_t k) {
  const Bin middle = narrow_to_digit<kRestBits>(magnitudes, kRestBits, k);
  const Bin low = narrow_to_digit<kRestBits>(magnitudes.first(middle.size), 0, middle.k);
  return (middle.digit << kRestBits) | low.digit;
}

std::uint32_t select_among(std::span<std::uint32_t> magnitudes, std::size_t k) {
  const Bin top = narrow_to_digit<kTopBits>(magnitudes, 2 * kRestBits, k);
  return (top.digit << (2 * kRestBits)) | select_rest(magnitudes.first(top.size), top.k);
}

std::uint32_t select_from_all(std::span<const float> x, std::size_t k) {
  const Bin top = top_bin(x, k);
  const std::uint32_t first = top.digit << (2 * kRestBits);
  const std::uint32_t last = first | ((1U << (2 * kRestBits)) - 1U);
  const Array<std::uint32_t> members(top.size + kSlack);
  const std::size_t count = kCollect(x, first, last, members.data(), top.size);
  TELEGRAD_CHECK(count == top.size);
  return first | select_rest(members.span().first(count), top.k);
}

// A magnitude that somewhat more than k of x should reach, by a sample; 0 where k is too large a share for that.
std::uint32_t sampled_bound(std::span<const float> x, std::size_t k) {
  const double expected = static_cast<double>(k) / static_cast<double>(x.size()) * static_cast<double>(kSample);
  // Four standard deviations beyond the expected rank, and some for luck: a miss costs a second pass.
  const auto rank = static_cast<std::size_t>(expected + 4.0 * __builtin_sqrt(expected) + 8.0);
  if (rank > kSample / 4) return 0;
  std::array<std::uint32_t, kSample> sample;
  std::uint64_t state = 0x9e3779b97f4a7c15U;
  for (std::uint32_t& magnitude : sample) {  // no stride: it could follow the columns of a matrix
    state = state * 6364136223846793005U + 1442695040888963407U;
    const std::uint64_t position = ((state >> 32) * x.size()) >> 32;
    magnitude = magnitude_bits(x[position]);
  }
  const auto at = sample.begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(sample.begin(), at, sample.end(), std::greater<>());
  return *at;
}

}  // namespace

float topk_threshold(std::span<const float> x, std::size_t k) {
  TELEGRAD_CHECK(k >= 1 && k <= x.size() && x.size() <= 0xffffffffU);
  const std::uint32_t bound = x.size() < kSmall ? 0U : sampled_bound(x, k);
  if (bound != 0) {
    const std::size_t most = std::max(4 * k, x.size() / 64);
    const Array<std::uint32_t> candidates(most + kSlack);
    const std::size_t count = kCollect(x, bound, kMagnitudeMask, candidates.data(), most);
    if (count >= k && count <= most) return std::bit_cast<float>(select_among(candidates.span().first(count), k));
  }
  return std::bit_cast<float>(select_from_all(x, k));
}

namespace reference {

float topk_threshold(std::span<const float> x, std::size_t k) {
  TELEGRAD_CHECK(k >= 1 && k <= x.size());
  std::vector<std::uint32_t> magnitudes(x.size());
  std::transform(x.begin(), x.end(), magnitudes.begin(), magnitude_bits);
  const auto at = magnitudes.begin() + static_cast<std::ptrdiff_t>(k - 1);
  std::nth_element(magnitudes.begin(), at, magnitudes.end(), std::greater<>());
  return std::bit_cast<float>(*at);
}

}  // namespace reference

}  // namespace telegrad::kernels
