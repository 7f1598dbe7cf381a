#include "codec/gap_code.hpp"

#include "base/check.hpp"
#include "codec/bit_words.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/intrinsics.hpp"
#include "kernels/pack_avx2.hpp"

namespace telegrad::kernels {
namespace {

// How far a pass has come: the low parts of `done` gaps, modulo 2^32.
struct Progress {
  std::size_t done = 0;
  std::uint32_t lows = 0;
};

// As many whole groups of `gaps` as there are.
using NumbersFunction = Progress(const std::uint32_t* indices, std::size_t gaps, std::uint32_t keep, std::uint32_t* numbers);
using IndicesFunction = Progress(std::uint32_t* indices, std::size_t gaps, std::uint32_t keep);

Progress numbers_portable(const std::uint32_t*, std::size_t, std::uint32_t, std::uint32_t*) { return {}; }
Progress indices_portable(std::uint32_t*, std::size_t, std::uint32_t) { return {}; }

#ifdef TELEGRAD_KERNELS_X86

// Of 8 numbers the sums up to each.
TELEGRAD_AVX2 inline __m256i sums_of(__m256i x) {
  x = _mm256_add_epi32(x, _mm256_slli_si256(x, 4));
  x = _mm256_add_epi32(x, _mm256_slli_si256(x, 8));  // within each half
  const __m256i lower = _mm256_shuffle_epi32(_mm256_permute2x128_si256(x, x, 0x08), 0xff);
  return _mm256_add_epi32(x, lower);
}

TELEGRAD_AVX2 inline __m256i last_of(__m256i x) { return _mm256_permutevar8x32_epi32(x, _mm256_set1_epi32(7)); }

TELEGRAD_AVX2 Progress numbers_avx2(const std::uint32_t* indices, std::size_t gaps, std::uint32_t keep,
                                    std::uint32_t* numbers) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(keep));
  const __m256i one = _mm256_set1_epi32(1);
  __m256i before = _mm256_setzero_si256();  // the low parts of earlier groups
  std::size_t j = 0;
  for (; j + 8 <= gaps; j += 8) {
    const __m256i here = load8(indices + j + 1);
    const __m256i gap = _mm256_sub_epi32(_mm256_sub_epi32(here, load8(indices + j)), one);
    const __m256i low = _mm256_and_si256(gap, mask);
    const __m256i sums = _mm256_add_epi32(before, sums_of(low));
    store8(numbers + j, _mm256_sub_epi32(here, _mm256_sub_epi32(sums, low)));
    before = last_of(sums);
  }
  return {j, static_cast<std::uint32_t>(_mm256_cvtsi256_si32(before))};
}

TELEGRAD_AVX2 Progress indices_avx2(std::uint32_t* indices, std::size_t gaps, std::uint32_t keep) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(keep));
  __m256i skipped = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(indices[0] + 1)),
                                     _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  __m256i before = _mm256_setzero_si256();
  std::size_t j = 0;
  for (; j + 8 <= gaps; j += 8) {
    const __m256i number = load8(indices + j + 1);
    const __m256i low = _mm256_and_si256(_mm256_sub_epi32(number, skipped), mask);
    const __m256i sums = _mm256_add_epi32(before, sums_of(low));
    store8(indices + j + 1, _mm256_add_epi32(number, _mm256_sub_epi32(sums, low)));
    before = last_of(sums);
    skipped = _mm256_add_epi32(skipped, _mm256_set1_epi32(8));
  }
  return {j, static_cast<std::uint32_t>(_mm256_cvtsi256_si32(before))};
}

constexpr std::size_t kGroup = 16;
constexpr __mmask16 kAll = 0xffff;

// Each lane's from so many lanes before; zeros first.
template <int kLanes>
TELEGRAD_AVX512 inline __m512i lanes_on(__m512i x) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_maskz_permutexvar_epi32(static_cast<__mmask16>(kAll << kLanes), _mm512_sub_epi32(lanes, _mm512_set1_epi32(kLanes)), x);
}

// Of 16 numbers the sums up to each.
TELEGRAD_AVX512 inline __m512i sums_of(__m512i x) {
  x = _mm512_add_epi32(x, lanes_on<1>(x));
  x = _mm512_add_epi32(x, lanes_on<2>(x));
  x = _mm512_add_epi32(x, lanes_on<4>(x));
  return _mm512_add_epi32(x, lanes_on<8>(x));
}

TELEGRAD_AVX512 inline __m512i last_of(__m512i x) {
  return _mm512_maskz_permutexvar_epi32(kAll, _mm512_set1_epi32(15), x);
}

TELEGRAD_AVX512 Progress numbers_avx512(const std::uint32_t* indices, std::size_t gaps, std::uint32_t keep,
                                        std::uint32_t* numbers) {
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(keep));
  const __m512i one = _mm512_set1_epi32(1);
  __m512i before = _mm512_setzero_si512();  // the low parts of earlier groups
  std::size_t j = 0;
  for (; j + kGroup <= gaps; j += kGroup) {
    const __m512i here = _mm512_loadu_si512(indices + j + 1);
    const __m512i gap = _mm512_sub_epi32(_mm512_sub_epi32(here, _mm512_loadu_si512(indices + j)), one);
    const __m512i low = _mm512_and_si512(gap, mask);
    const __m512i sums = _mm512_add_epi32(before, sums_of(low));
    _mm512_storeu_si512(numbers + j, _mm512_sub_epi32(here, _mm512_sub_epi32(sums, low)));
    before = last_of(sums);
  }
  return {j, static_cast<std::uint32_t>(_mm512_cvtsi512_si32(before))};
}

TELEGRAD_AVX512 Progress indices_avx512(std::uint32_t* indices, std::size_t gaps, std::uint32_t keep) {
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(keep));
  __m512i skipped = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(indices[0] + 1)),
                                     _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  __m512i before = _mm512_setzero_si512();
  std::size_t j = 0;
  for (; j + kGroup <= gaps; j += kGroup) {
    const __m512i number = _mm512_loadu_si512(indices + j + 1);
    const __m512i low = _mm512_and_si512(_mm512_sub_epi32(number, skipped), mask);
    const __m512i sums = _mm512_add_epi32(before, sums_of(low));
    _mm512_storeu_si512(indices + j + 1, _mm512_add_epi32(number, _mm512_sub_epi32(sums, low)));
    before = last_of(sums);
    skipped = _mm512_add_epi32(skipped, _mm512_set1_epi32(kGroup));
  }
  return {j, static_cast<std::uint32_t>(_mm512_cvtsi512_si32(before))};
}

constexpr Variants<NumbersFunction> kNumbers{numbers_portable, numbers_avx2, numbers_avx512};
constexpr Variants<IndicesFunction> kIndices{indices_portable, indices_avx2, indices_avx512};

#else

constexpr Variants<NumbersFunction> kNumbers{numbers_portable};
constexpr Variants<IndicesFunction> kIndices{indices_portable};

#endif

std::uint32_t low_of_gap(std::span<const std::uint32_t> indices, std::size_t j, std::uint32_t keep) {
  return (indices[j + 1] - indices[j] - 1) & keep;
}

}  // namespace

void gap_numbers(std::span<const std::uint32_t> indices, unsigned width, std::span<std::uint32_t> numbers) {
  TELEGRAD_CHECK(numbers.size() + 1 == indices.size() && width <= 31);
  const auto keep = static_cast<std::uint32_t>(low_bits(width));
  auto [j, lows] = kNumbers(indices.data(), numbers.size(), keep, numbers.data());
  for (; j < numbers.size(); ++j) {
    numbers[j] = indices[j + 1] - lows;
    lows += low_of_gap(indices, j, keep);
  }
}

std::uint32_t last_gap_number(std::span<const std::uint32_t> indices, unsigned width) {
  TELEGRAD_CHECK(!indices.empty() && width <= 31);
  const auto keep = static_cast<std::uint32_t>(low_bits(width));
  std::uint32_t lows = 0;  // of the gaps before the last one
  for (std::size_t j = 0; j + 2 < indices.size(); ++j) lows += low_of_gap(indices, j, keep);
  return indices.back() - lows;
}

void gap_indices(std::span<std::uint32_t> indices, unsigned width) {
  TELEGRAD_CHECK(!indices.empty() && width <= 31);
  const auto keep = static_cast<std::uint32_t>(low_bits(width));
  const std::size_t gaps = indices.size() - 1;
  auto [j, lows] = kIndices(indices.data(), gaps, keep);
  for (; j < gaps; ++j) {
    const std::uint32_t low = (indices[j + 1] - indices[0] - 1 - static_cast<std::uint32_t>(j)) & keep;
    indices[j + 1] += lows;
    lows += low;
  }
}

namespace reference {

void gap_numbers(std::span<const std::uint32_t> indices, unsigned width, std::span<std::uint32_t> numbers) {
  for (std::size_t j = 0; j < numbers.size(); ++j) {
    numbers[j] = indices[j + 1];
    for (std::size_t i = 0; i < j; ++i) {
      numbers[j] -= (indices[i + 1] - indices[i] - 1) % (std::uint32_t{1} << width);
    }
  }
}

void gap_indices(std::span<std::uint32_t> indices, unsigned width) {
  std::uint32_t unary = 0;  // of all gaps so far, in multiples of 2^width
  for (std::size_t j = 1; j < indices.size(); ++j) {
    const std::uint32_t offset = indices[j] - indices[0] - static_cast<std::uint32_t>(j);
    const std::uint32_t low = offset % (std::uint32_t{1} << width);
    const std::uint32_t so_far = offset - low;
    indices[j] = low + so_far - unary;  // the gap, less 1
    unary = so_far;
  }
  for (std::size_t j = 1; j < indices.size(); ++j) indices[j] += indices[j - 1] + 1;
}

}  // namespace reference

}  // namespace telegrad::kernels
