#include "kernels/average.hpp"

#include <bit>
#include <cstring>
#include <type_traits>

#include "base/check.hpp"
#include "kernels/arithmetic.hpp"
#include "kernels/elementwise.hpp"

namespace telegrad::kernels {
namespace {

struct Factors {
  float left;
  float right;
  float sum;
};

constexpr std::uint32_t kInfinity = 0x7f800000U;
constexpr std::uint32_t kLargestF16 = 0x477fe000U;  // 65,504

// Finite in f32, whatever finite f16 went in, since factors are no more than a few powers of two.
TELEGRAD_INTO_CALLER float within_f16(float value) {
  const auto word = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = word & kMagnitudeMask;
  const bool beyond = magnitude > kLargestF16 && magnitude < kInfinity;
  return std::bit_cast<float>((word & ~kMagnitudeMask) | (beyond ? kLargestF16 : magnitude));
}

template <class V>
TELEGRAD_INTO_CALLER float scaled_sum(float left, float right, Factors factors) {
  const float sum = canonical((left * factors.left + right * factors.right) * factors.sum);
  return std::is_same_v<V, f16> ? within_f16(sum) : sum;
}

using AddFunction = void(const std::byte* a, const std::byte* b, std::byte* out, Factors factors, std::size_t count);

template <class V>
TELEGRAD_INTO_CALLER void add_all(const std::byte* a, const std::byte* b, std::byte* out, Factors factors,
                                  std::size_t count) {
  const auto* const left = elements<V>(a);
  const auto* const right = elements<V>(b);
  auto* const result = elements<V>(out);
#pragma GCC ivdep  // `out` may be `a` or `b`
  for (std::size_t i = 0; i < count; ++i) {
    result[i].set(V(scaled_sum<V>(static_cast<float>(left[i].get()), static_cast<float>(right[i].get()), factors)));
  }
}

template <class V>
void add_portable(const std::byte* a, const std::byte* b, std::byte* out, Factors factors, std::size_t count) {
  add_all<V>(a, b, out, factors, count);
}

#ifdef TELEGRAD_KERNELS_X86

TELEGRAD_AVX2 void add_bf16_avx2(const std::byte* a, const std::byte* b, std::byte* out, Factors factors,
                                 std::size_t count) {
  add_all<bf16>(a, b, out, factors, count);
}
TELEGRAD_AVX512 void add_bf16_avx512(const std::byte* a, const std::byte* b, std::byte* out, Factors factors,
                                     std::size_t count) {
  add_all<bf16>(a, b, out, factors, count);
}

TELEGRAD_AVX2 void add_halves(const std::byte* a, const std::byte* b, std::byte* out, Factors factors,
                              std::size_t count) {
  std::size_t i = 0;
  for (; i + kHalves <= count; i += kHalves) {
    float left[kHalves], right[kHalves];
    widen(a + i * sizeof(f16), left);
    widen(b + i * sizeof(f16), right);
    for (std::size_t j = 0; j < kHalves; ++j) left[j] = scaled_sum<f16>(left[j], right[j], factors);
    narrow(left, out + i * sizeof(f16));
  }
  add_all<f16>(a + i * sizeof(f16), b + i * sizeof(f16), out + i * sizeof(f16), factors, count - i);
}

constexpr Variants<AddFunction> kAddBf16{add_portable<bf16>, add_bf16_avx2, add_bf16_avx512};
constexpr Variants<AddFunction> kAddF16{add_portable<f16>, add_halves};

#else

constexpr Variants<AddFunction> kAddBf16{add_portable<bf16>};
constexpr Variants<AddFunction> kAddF16{add_portable<f16>};

#endif

void check(DType dtype, const ScaledVector& a, const ScaledVector& b, Bytes out) {
  TELEGRAD_CHECK(dtype == DType::f16 || dtype == DType::bf16);
  TELEGRAD_CHECK(a.values.size() == b.values.size() && a.values.size() == out.size() && out.size() % 2 == 0);
}

template <class V>
void add_one_by_one(const ScaledVector& a, const ScaledVector& b, Factors factors, Bytes out) {
  for (std::size_t at = 0; at < out.size(); at += sizeof(V)) {
    V left, right;
    std::memcpy(&left, a.values.data() + at, sizeof(V));
    std::memcpy(&right, b.values.data() + at, sizeof(V));
    const V result(scaled_sum<V>(static_cast<float>(left), static_cast<float>(right), factors));
    std::memcpy(out.data() + at, &result, sizeof(V));
  }
}

}  // namespace

void add_scaled(DType dtype, ScaledVector a, ScaledVector b, float factor, Bytes out) {
  check(dtype, a, b, out);
  const auto& add = dtype == DType::f16 ? kAddF16 : kAddBf16;
  add(a.values.data(), b.values.data(), out.data(), Factors{a.factor, b.factor, factor}, out.size() / 2);
}

void reference::add_scaled(DType dtype, ScaledVector a, ScaledVector b, float factor, Bytes out) {
  check(dtype, a, b, out);
  const Factors factors{a.factor, b.factor, factor};
  dtype == DType::f16 ? add_one_by_one<f16>(a, b, factors, out) : add_one_by_one<bf16>(a, b, factors, out);
}

}  // namespace telegrad::kernels
