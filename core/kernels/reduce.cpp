#include "kernels/reduce.hpp"

#include <cstring>

#include "base/check.hpp"
#include "kernels/arithmetic.hpp"
#include "kernels/dispatch.hpp"

#ifdef TELEGRAD_KERNELS_X86
#include <immintrin.h>
#endif

namespace telegrad::kernels {
namespace {

// Counts are elements. Loads go through memcpy: the bytes may lie anywhere.
using AddFunction = void(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count);
using ScaleFunction = void(std::byte* values, float factor, std::size_t count);

constexpr std::size_t kBlock = 32;  // a fixed trip count is what lets -O2 vectorise

template <class V>
void add_tail(const std::byte* a, const std::byte* b, std::byte* out, std::size_t first, std::size_t count) {
  for (std::size_t i = first; i < count; ++i) {
    V left, right;
    std::memcpy(&left, a + i * sizeof(V), sizeof(V));
    std::memcpy(&right, b + i * sizeof(V), sizeof(V));
    const V sum = plus(left, right);
    std::memcpy(out + i * sizeof(V), &sum, sizeof(V));
  }
}

template <class V>
void scale_tail(std::byte* values, float factor, std::size_t first, std::size_t count) {
  for (std::size_t i = first; i < count; ++i) {
    V value;
    std::memcpy(&value, values + i * sizeof(V), sizeof(V));
    value = times(value, factor);
    std::memcpy(values + i * sizeof(V), &value, sizeof(V));
  }
}

template <class V>
void add_portable(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    V left[kBlock], right[kBlock];
    std::memcpy(left, a + i * sizeof(V), sizeof left);
    std::memcpy(right, b + i * sizeof(V), sizeof right);
    for (std::size_t j = 0; j < kBlock; ++j) left[j] = plus(left[j], right[j]);
    std::memcpy(out + i * sizeof(V), left, sizeof left);
  }
  add_tail<V>(a, b, out, i, count);
}

template <class V>
void scale_portable(std::byte* values, float factor, std::size_t count) {
  std::size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    V block[kBlock];
    std::memcpy(block, values + i * sizeof(V), sizeof block);
    for (std::size_t j = 0; j < kBlock; ++j) block[j] = times(block[j], factor);
    std::memcpy(values + i * sizeof(V), block, sizeof block);
  }
  scale_tail<V>(values, factor, i, count);
}

#ifdef TELEGRAD_KERNELS_X86

TELEGRAD_AVX2 inline __m256 canonical_avx2(__m256 value) {
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kQuietNan)));
  return _mm256_blendv_ps(value, nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
}

TELEGRAD_AVX2 inline __m256 widen_avx2(const std::byte* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// Eight f32 to eight bf16 as bf16::round does it: nearest even, one NaN.
TELEGRAD_AVX2 inline void narrow_avx2(std::byte* to, __m256 value) {
  const __m256i word = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(word, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i unordered = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), unordered);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}

TELEGRAD_AVX2 void add_f32_avx2(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 left = _mm256_loadu_ps(reinterpret_cast<const float*>(a + i * 4));
    const __m256 right = _mm256_loadu_ps(reinterpret_cast<const float*>(b + i * 4));
    _mm256_storeu_ps(reinterpret_cast<float*>(out + i * 4), canonical_avx2(_mm256_add_ps(left, right)));
  }
  add_tail<float>(a, b, out, i, count);
}

TELEGRAD_AVX2 void add_bf16_avx2(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    narrow_avx2(out + i * 2, _mm256_add_ps(widen_avx2(a + i * 2), widen_avx2(b + i * 2)));
  }
  add_tail<bf16>(a, b, out, i, count);
}

TELEGRAD_AVX2 void scale_f32_avx2(std::byte* values, float factor, std::size_t count) {
  const __m256 factors = _mm256_set1_ps(factor);
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    float* const at = reinterpret_cast<float*>(values + i * 4);
    _mm256_storeu_ps(at, canonical_avx2(_mm256_mul_ps(_mm256_loadu_ps(at), factors)));
  }
  scale_tail<float>(values, factor, i, count);
}

TELEGRAD_AVX2 void scale_bf16_avx2(std::byte* values, float factor, std::size_t count) {
  const __m256 factors = _mm256_set1_ps(factor);
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    narrow_avx2(values + i * 2, _mm256_mul_ps(widen_avx2(values + i * 2), factors));
  }
  scale_tail<bf16>(values, factor, i, count);
}

TELEGRAD_AVX512 inline __m512 canonical_avx512(__m512 value) {
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(kQuietNan)));
  return _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), nan);
}

TELEGRAD_AVX512 inline __m512 widen_avx512(const std::byte* from) {
  const __mmask16 all = 0xffff;
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(all, _mm512_maskz_cvtepu16_epi32(all, halves), 16));
}

TELEGRAD_AVX512 inline void narrow_avx512(std::byte* to, __m512 value) {
  const __mmask16 all = 0xffff;
  const __m512i word = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(all, word, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_maskz_srli_epi32(
      all, _mm512_add_epi32(word, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 unordered = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  const __m512i words = _mm512_mask_mov_epi32(rounded, unordered, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(all, words));
}

// Tails are scalar: masked stores of 16-bit lanes are slow on some CPUs, and slices are long.
TELEGRAD_AVX512 void add_f32_avx512(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(a + i * 4), _mm512_loadu_ps(b + i * 4));
    _mm512_storeu_ps(out + i * 4, canonical_avx512(sum));
  }
  add_tail<float>(a, b, out, i, count);
}

TELEGRAD_AVX512 void add_bf16_avx512(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    narrow_avx512(out + i * 2, _mm512_add_ps(widen_avx512(a + i * 2), widen_avx512(b + i * 2)));
  }
  add_tail<bf16>(a, b, out, i, count);
}

TELEGRAD_AVX512 void scale_f32_avx512(std::byte* values, float factor, std::size_t count) {
  const __m512 factors = _mm512_set1_ps(factor);
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    _mm512_storeu_ps(values + i * 4, canonical_avx512(_mm512_mul_ps(_mm512_loadu_ps(values + i * 4), factors)));
  }
  scale_tail<float>(values, factor, i, count);
}

TELEGRAD_AVX512 void scale_bf16_avx512(std::byte* values, float factor, std::size_t count) {
  const __m512 factors = _mm512_set1_ps(factor);
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    narrow_avx512(values + i * 2, _mm512_mul_ps(widen_avx512(values + i * 2), factors));
  }
  scale_tail<bf16>(values, factor, i, count);
}

constexpr Variants<AddFunction> kAddF32{add_portable<float>, add_f32_avx2, add_f32_avx512};
constexpr Variants<AddFunction> kAddBf16{add_portable<bf16>, add_bf16_avx2, add_bf16_avx512};
constexpr Variants<ScaleFunction> kScaleF32{scale_portable<float>, scale_f32_avx2, scale_f32_avx512};
constexpr Variants<ScaleFunction> kScaleBf16{scale_portable<bf16>, scale_bf16_avx2, scale_bf16_avx512};

#else

constexpr Variants<AddFunction> kAddF32{add_portable<float>};
constexpr Variants<AddFunction> kAddBf16{add_portable<bf16>};
constexpr Variants<ScaleFunction> kScaleF32{scale_portable<float>};
constexpr Variants<ScaleFunction> kScaleBf16{scale_portable<bf16>};

#endif

std::size_t checked_count(DType dtype, std::size_t bytes) {
  TELEGRAD_CHECK(dtype == DType::f32 || dtype == DType::bf16);
  TELEGRAD_CHECK(bytes % size_of(dtype) == 0);
  return bytes / size_of(dtype);
}

}  // namespace

void add(DType dtype, Bytes accumulator, ConstBytes addend) { add_to(dtype, accumulator, addend, accumulator); }

void add_to(DType dtype, ConstBytes a, ConstBytes b, Bytes out) {
  TELEGRAD_CHECK(a.size() == b.size() && a.size() == out.size());
  const std::size_t count = checked_count(dtype, a.size());
  const auto& kernel = dtype == DType::f32 ? kAddF32 : kAddBf16;
  kernel(a.data(), b.data(), out.data(), count);
}

void reduce_to(DType dtype, Reduction reduction, ConstBytes a, ConstBytes b, Bytes out) {
  TELEGRAD_CHECK(reduction == Reduction::sum || reduction == Reduction::avg);
  add_to(dtype, a, b, out);
}

void scale(DType dtype, Bytes values, float factor) {
  const std::size_t count = checked_count(dtype, values.size());
  const auto& kernel = dtype == DType::f32 ? kScaleF32 : kScaleBf16;
  kernel(values.data(), factor, count);
}

namespace reference {

void add_to(DType dtype, ConstBytes a, ConstBytes b, Bytes out) {
  TELEGRAD_CHECK(a.size() == b.size() && a.size() == out.size());
  const std::size_t count = checked_count(dtype, a.size());
  const auto kernel = dtype == DType::f32 ? add_tail<float> : add_tail<bf16>;
  kernel(a.data(), b.data(), out.data(), 0, count);
}

void scale(DType dtype, Bytes values, float factor) {
  const std::size_t count = checked_count(dtype, values.size());
  const auto kernel = dtype == DType::f32 ? scale_tail<float> : scale_tail<bf16>;
  kernel(values.data(), factor, 0, count);
}

}  // namespace reference

}  // namespace telegrad::kernels
