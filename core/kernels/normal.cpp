#include "kernels/normal.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/check.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/intrinsics.hpp"

namespace telegrad::kernels {
namespace {

constexpr std::size_t kLanes = 16;

struct Sums {
  alignas(64) std::array<double, kLanes> first{};   // of the entries: element i in lane i % 16
  alignas(64) std::array<double, kLanes> second{};  // of their squares
};

// Adds whole groups of 16, and returns how many elements those are. `gradient` may be null: nothing is added.
using GroupsFunction = std::size_t(float* residual, const float* gradient, std::size_t size, Sums* sums);

void add_rest(float* residual, const float* gradient, std::size_t begin, std::size_t size, Sums& sums) {
  for (std::size_t i = begin; i < size; ++i) {
    if (gradient != nullptr) residual[i] += gradient[i];
    const double value = residual[i];
    sums.first[i % kLanes] += value;
    sums.second[i % kLanes] += value * value;
  }
}

std::size_t add_groups_portable(float* residual, const float* gradient, std::size_t size, Sums* sums) {
  Sums own;
  std::size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    float values[kLanes];
    for (std::size_t j = 0; j < kLanes; ++j) values[j] = residual[i + j];
    if (gradient != nullptr) {
      for (std::size_t j = 0; j < kLanes; ++j) values[j] += gradient[i + j];
      for (std::size_t j = 0; j < kLanes; ++j) residual[i + j] = values[j];
    }
    for (std::size_t j = 0; j < kLanes; ++j) own.first[j] += static_cast<double>(values[j]);
    for (std::size_t j = 0; j < kLanes; ++j) {
      own.second[j] += static_cast<double>(values[j]) * static_cast<double>(values[j]);
    }
  }
  *sums = own;
  return i;
}

#ifdef TELEGRAD_KERNELS_X86

TELEGRAD_AVX2 std::size_t add_groups_avx2(float* residual, const float* gradient, std::size_t size, Sums* sums) {
  __m256d first[4], second[4];
  for (unsigned j = 0; j < 4; ++j) first[j] = second[j] = _mm256_setzero_pd();
  std::size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (unsigned half = 0; half < 2; ++half) {
      __m256 values = _mm256_loadu_ps(residual + i + 8 * half);
      if (gradient != nullptr) {
        values = _mm256_add_ps(values, _mm256_loadu_ps(gradient + i + 8 * half));
        _mm256_storeu_ps(residual + i + 8 * half, values);
      }
      const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(values));
      const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
      first[2 * half] = _mm256_add_pd(first[2 * half], low);
      first[2 * half + 1] = _mm256_add_pd(first[2 * half + 1], high);
      second[2 * half] = _mm256_add_pd(second[2 * half], _mm256_mul_pd(low, low));
      second[2 * half + 1] = _mm256_add_pd(second[2 * half + 1], _mm256_mul_pd(high, high));
    }
  }
  for (unsigned j = 0; j < 4; ++j) {
    _mm256_store_pd(sums->first.data() + 4 * j, first[j]);
    _mm256_store_pd(sums->second.data() + 4 * j, second[j]);
  }
  return i;
}

TELEGRAD_AVX512 std::size_t add_groups_avx512(float* residual, const float* gradient, std::size_t size, Sums* sums) {
  constexpr __mmask8 kAll = 0xff;  // leaves nothing out: GCC 12 warns of the variants without
  __m512d first[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()}, second[2] = {first[0], first[0]};
  std::size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    __m512 values = _mm512_loadu_ps(residual + i);
    if (gradient != nullptr) {
      values = _mm512_add_ps(values, _mm512_loadu_ps(gradient + i));
      _mm512_storeu_ps(residual + i, values);
    }
    const __m512i bits = _mm512_castps_si512(values);
    const __m256i low_bits = _mm512_maskz_extracti64x4_epi64(kAll, bits, 0);
    const __m256i high_bits = _mm512_maskz_extracti64x4_epi64(kAll, bits, 1);
    const __m512d low = _mm512_maskz_cvtps_pd(kAll, _mm256_castsi256_ps(low_bits));
    const __m512d high = _mm512_maskz_cvtps_pd(kAll, _mm256_castsi256_ps(high_bits));
    first[0] = _mm512_add_pd(first[0], low);
    first[1] = _mm512_add_pd(first[1], high);
    second[0] = _mm512_add_pd(second[0], _mm512_mul_pd(low, low));
    second[1] = _mm512_add_pd(second[1], _mm512_mul_pd(high, high));
  }
  for (unsigned j = 0; j < 2; ++j) {
    _mm512_store_pd(sums->first.data() + 8 * j, first[j]);
    _mm512_store_pd(sums->second.data() + 8 * j, second[j]);
  }
  return i;
}

constexpr Variants<GroupsFunction> kAddGroups{add_groups_portable, add_groups_avx2, add_groups_avx512};

#else

constexpr Variants<GroupsFunction> kAddGroups{add_groups_portable};

#endif

double folded(std::array<double, kLanes> lanes) {
  for (std::size_t width = kLanes / 2; width != 0; width /= 2) {
    for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

Normal fitted(const Sums& sums, std::size_t size) {
  const auto count = static_cast<double>(size);
  const double mean = folded(sums.first) / count;
  const double variance = folded(sums.second) / count - mean * mean;
  return {mean, variance > 0.0 ? std::sqrt(variance) : variance < 0.0 ? 0.0 : variance};  // a NaN stays
}

void check(std::span<const float> residual, std::span<const float> gradient) {
  TELEGRAD_CHECK(!residual.empty() && (residual.size() == gradient.size() || gradient.empty()));
}

}  // namespace

Normal accumulate_normal(std::span<float> residual, std::span<const float> gradient) {
  check(residual, gradient);
  const float* const addend = gradient.empty() ? nullptr : gradient.data();
  Sums sums;
  Sums* const into = &sums;
  float* const values = residual.data();
  const std::size_t done = kAddGroups(values, addend, residual.size(), into);
  add_rest(values, addend, done, residual.size(), sums);
  return fitted(sums, residual.size());
}

namespace reference {

Normal accumulate_normal(std::span<float> residual, std::span<const float> gradient) {
  check(residual, gradient);
  Sums sums;
  add_rest(residual.data(), gradient.empty() ? nullptr : gradient.data(), 0, residual.size(), sums);
  return fitted(sums, residual.size());
}

}  // namespace reference

}  // namespace telegrad::kernels
