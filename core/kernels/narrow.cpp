#include "kernels/narrow.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/check.hpp"
#include "kernels/arithmetic.hpp"
#include "kernels/elementwise.hpp"

namespace telegrad::kernels {
namespace {

constexpr std::uint32_t kInfinity = 0x7f800000U;
constexpr std::uint32_t kNan = 0x7fc00000U;

// What is kept of a value that decodes to `decoded`.
TELEGRAD_INTO_CALLER float lost(float value, float decoded) {
  return magnitude_bits(decoded) < kInfinity ? value - decoded : 0.0F;
}

using NarrowFunction = void(const std::byte* values, std::byte* out, std::byte* error, std::size_t count);
using WidenFunction = void(const std::byte* encoded, std::byte* values, std::size_t count);

template <class V>
TELEGRAD_INTO_CALLER void narrow_all(const std::byte* values, std::byte* out, std::byte* error, std::size_t count) {
  const auto* const from = elements<float>(values);
  auto* const to = elements<V>(out);
  if (error == nullptr) {
    for (std::size_t i = 0; i < count; ++i) to[i].set(V(from[i].get()));
    return;
  }
  auto* const errors = elements<float>(error);
#pragma GCC ivdep  // `error` may be `values`
  for (std::size_t i = 0; i < count; ++i) {
    const float value = from[i].get();
    const V rounded(value);
    to[i].set(rounded);
    errors[i].set(lost(value, static_cast<float>(rounded)));
  }
}

template <class V>
TELEGRAD_INTO_CALLER void widen_all(const std::byte* encoded, std::byte* values, std::size_t count) {
  const auto* const from = elements<V>(encoded);
  auto* const to = elements<float>(values);
  for (std::size_t i = 0; i < count; ++i) to[i].set(canonical(static_cast<float>(from[i].get())));
}

template <class V>
void narrow_portable(const std::byte* values, std::byte* out, std::byte* error, std::size_t count) {
  narrow_all<V>(values, out, error, count);
}
template <class V>
void widen_portable(const std::byte* encoded, std::byte* values, std::size_t count) {
  widen_all<V>(encoded, values, count);
}

#ifdef TELEGRAD_KERNELS_X86

TELEGRAD_AVX2 void narrow_bf16_avx2(const std::byte* values, std::byte* out, std::byte* error, std::size_t count) {
  narrow_all<bf16>(values, out, error, count);
}
TELEGRAD_AVX512 void narrow_bf16_avx512(const std::byte* values, std::byte* out, std::byte* error, std::size_t count) {
  narrow_all<bf16>(values, out, error, count);
}
TELEGRAD_AVX2 void widen_bf16_avx2(const std::byte* encoded, std::byte* values, std::size_t count) {
  widen_all<bf16>(encoded, values, count);
}
TELEGRAD_AVX512 void widen_bf16_avx512(const std::byte* encoded, std::byte* values, std::size_t count) {
  widen_all<bf16>(encoded, values, count);
}

// The compiler does not find the instructions that convert halves by itself.
constexpr std::size_t kRegister = 8;

TELEGRAD_AVX2 inline __m256 canonical(__m256 values) {
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kNan)));
  return _mm256_blendv_ps(values, nan, _mm256_cmp_ps(values, values, _CMP_UNORD_Q));
}

TELEGRAD_AVX2 void narrow_halves(const std::byte* values, std::byte* out, std::byte* error, std::size_t count) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kMagnitudeMask)));
  const __m256 infinity = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kInfinity)));
  std::size_t i = 0;
  for (; i + kRegister <= count; i += kRegister) {
    const __m256 wide = _mm256_loadu_ps(reinterpret_cast<const float*>(values) + i);
    const __m128i halves = _mm256_cvtps_ph(canonical(wide), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * sizeof(f16)), halves);
    if (error == nullptr) continue;
    const __m256 rounded = _mm256_cvtph_ps(halves);
    const __m256 finite = _mm256_cmp_ps(_mm256_and_ps(rounded, magnitude), infinity, _CMP_LT_OQ);
    _mm256_storeu_ps(reinterpret_cast<float*>(error) + i, _mm256_and_ps(finite, _mm256_sub_ps(wide, rounded)));
  }
  narrow_all<f16>(values + i * sizeof(float), out + i * sizeof(f16),
                  error == nullptr ? nullptr : error + i * sizeof(float), count - i);
}

TELEGRAD_AVX2 void widen_halves(const std::byte* encoded, std::byte* values, std::size_t count) {
  std::size_t i = 0;
  for (; i + kRegister <= count; i += kRegister) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(encoded + i * sizeof(f16)));
    _mm256_storeu_ps(reinterpret_cast<float*>(values) + i, canonical(_mm256_cvtph_ps(halves)));
  }
  widen_all<f16>(encoded + i * sizeof(f16), values + i * sizeof(float), count - i);
}

constexpr Variants<NarrowFunction> kNarrowBf16{narrow_portable<bf16>, narrow_bf16_avx2, narrow_bf16_avx512};
constexpr Variants<NarrowFunction> kNarrowF16{narrow_portable<f16>, narrow_halves};
constexpr Variants<WidenFunction> kWidenBf16{widen_portable<bf16>, widen_bf16_avx2, widen_bf16_avx512};
constexpr Variants<WidenFunction> kWidenF16{widen_portable<f16>, widen_halves};

#else

constexpr Variants<NarrowFunction> kNarrowBf16{narrow_portable<bf16>};
constexpr Variants<NarrowFunction> kNarrowF16{narrow_portable<f16>};
constexpr Variants<WidenFunction> kWidenBf16{widen_portable<bf16>};
constexpr Variants<WidenFunction> kWidenF16{widen_portable<f16>};

#endif

// What a mean is made of. The sum has kLanes parts, value i in part i % kLanes, so that its bits do not depend on how
// many are added at a time.
constexpr std::size_t kLanes = 16;
struct Tally {
  double sums[kLanes] = {};
  std::uint32_t largest[kLanes] = {};  // magnitude
  std::int32_t least[kLanes] = {};
  std::int32_t most[kLanes] = {};

  TELEGRAD_INTO_CALLER void add(std::size_t lane, float value) {
    sums[lane] += static_cast<double>(value);
    const std::uint32_t magnitude = magnitude_bits(value);
    const auto sign = magnitude == 0 ? 0 : std::bit_cast<std::int32_t>(value) >> 31 | 1;  // -1, 0 or 1
    largest[lane] = std::max(largest[lane], magnitude);
    least[lane] = std::min(least[lane], sign);
    most[lane] = std::max(most[lane], sign);
  }
};
using TallyFunction = void(const std::byte* values, std::size_t count, Tally& tally);

TELEGRAD_INTO_CALLER void tally_all(const std::byte* values, std::size_t count, Tally& tally) {
  const auto* const from = elements<float>(values);
  Tally local;
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) local.add(lane, from[i + lane].get());
  }
  for (; i < count; ++i) local.add(i % kLanes, from[i].get());
  tally = local;
}

void tally_portable(const std::byte* values, std::size_t count, Tally& tally) { tally_all(values, count, tally); }

#ifdef TELEGRAD_KERNELS_X86

TELEGRAD_AVX2 void tally_avx2(const std::byte* values, std::size_t count, Tally& tally) {
  tally_all(values, count, tally);
}
TELEGRAD_AVX512 void tally_avx512(const std::byte* values, std::size_t count, Tally& tally) {
  tally_all(values, count, tally);
}
constexpr Variants<TallyFunction> kTally{tally_portable, tally_avx2, tally_avx512};

#else

constexpr Variants<TallyFunction> kTally{tally_portable};

#endif

// False where signs differ.
bool mean_of(const Tally& tally, std::size_t count, float& mean) {
  if (*std::ranges::max_element(tally.largest) >= kInfinity) {
    mean = std::bit_cast<float>(kNan);
    return true;
  }
  if (*std::ranges::min_element(tally.least) < 0 && *std::ranges::max_element(tally.most) > 0) return false;
  double sum = 0.0;
  for (const double part : tally.sums) sum += part;
  mean = count == 0 ? 0.0F : static_cast<float>(sum / static_cast<double>(count));
  return true;
}

const std::byte* bytes_of(std::span<const float> values) { return reinterpret_cast<const std::byte*>(values.data()); }
std::byte* bytes_of(std::span<float> values) { return reinterpret_cast<std::byte*>(values.data()); }

void check_lengths(DType dtype, std::size_t bytes, std::size_t count) {
  TELEGRAD_CHECK((dtype == DType::bf16 || dtype == DType::f16) && bytes == count * sizeof(bf16));
}
void check_error(std::span<const float> values, std::span<float> error) {
  TELEGRAD_CHECK(error.empty() || error.size() == values.size());
}

}  // namespace

void narrow(DType dtype, std::span<const float> values, Bytes out, std::span<float> error) {
  check_lengths(dtype, out.size(), values.size());
  check_error(values, error);
  const auto& kernel = dtype == DType::bf16 ? kNarrowBf16 : kNarrowF16;
  kernel(bytes_of(values), out.data(), error.empty() ? nullptr : bytes_of(error), values.size());
}

void widen(DType dtype, ConstBytes encoded, std::span<float> values) {
  check_lengths(dtype, encoded.size(), values.size());
  const auto& kernel = dtype == DType::bf16 ? kWidenBf16 : kWidenF16;
  kernel(encoded.data(), bytes_of(values), values.size());
}

bool mean_of_one_sign(std::span<const float> values, Bytes out, std::span<float> error) {
  TELEGRAD_CHECK(out.size() == kMeanBytes);
  check_error(values, error);
  Tally tally;
  const std::byte* const from = bytes_of(values);
  kTally.at(simd_level())(from, values.size(), tally);
  float mean;
  if (!mean_of(tally, values.size(), mean)) return false;
  std::memcpy(out.data(), &mean, sizeof mean);
  for (std::size_t i = 0; i < error.size(); ++i) error[i] = lost(values[i], mean);
  return true;
}

bool fill_mean(ConstBytes encoded, std::span<float> values) {
  if (encoded.size() != kMeanBytes) return false;
  float mean;
  std::memcpy(&mean, encoded.data(), sizeof mean);
  if (magnitude_bits(mean) >= kInfinity && std::bit_cast<std::uint32_t>(mean) != kNan) return false;
  std::ranges::fill(values, mean);
  return true;
}

namespace reference {
namespace {

template <class V>
void narrow_one_by_one(std::span<const float> values, Bytes out, std::span<float> error) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float value = values[i];
    const V rounded(value);
    std::memcpy(out.data() + i * sizeof rounded, &rounded, sizeof rounded);
    if (!error.empty()) error[i] = std::isfinite(static_cast<float>(rounded)) ? value - static_cast<float>(rounded) : 0.0F;
  }
}

template <class V>
void widen_one_by_one(ConstBytes encoded, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    V value;
    std::memcpy(&value, encoded.data() + i * sizeof value, sizeof value);
    values[i] = canonical(static_cast<float>(value));
  }
}

}  // namespace

void narrow(DType dtype, std::span<const float> values, Bytes out, std::span<float> error) {
  check_lengths(dtype, out.size(), values.size());
  check_error(values, error);
  return dtype == DType::bf16 ? narrow_one_by_one<bf16>(values, out, error)
                              : narrow_one_by_one<f16>(values, out, error);
}

void widen(DType dtype, ConstBytes encoded, std::span<float> values) {
  check_lengths(dtype, encoded.size(), values.size());
  return dtype == DType::bf16 ? widen_one_by_one<bf16>(encoded, values) : widen_one_by_one<f16>(encoded, values);
}

bool mean_of_one_sign(std::span<const float> values, Bytes out, std::span<float> error) {
  TELEGRAD_CHECK(out.size() == kMeanBytes);
  check_error(values, error);
  const bool finite = std::ranges::all_of(values, [](float value) { return std::isfinite(value); });
  const bool below = std::ranges::any_of(values, [](float value) { return value < 0.0F; });
  const bool above = std::ranges::any_of(values, [](float value) { return value > 0.0F; });
  if (finite && below && above) return false;
  double parts[kLanes] = {};
  for (std::size_t i = 0; i < values.size(); ++i) parts[i % kLanes] += static_cast<double>(values[i]);
  double sum = 0.0;
  for (const double part : parts) sum += part;
  float mean = values.empty() ? 0.0F : static_cast<float>(sum / static_cast<double>(values.size()));
  if (!finite) mean = std::bit_cast<float>(kNan);
  std::memcpy(out.data(), &mean, sizeof mean);
  for (std::size_t i = 0; i < error.size(); ++i) error[i] = finite ? values[i] - mean : 0.0F;
  return true;
}

}  // namespace reference

}  // namespace telegrad::kernels
