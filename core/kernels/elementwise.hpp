#pragma once
// What the loops over dense vectors have in common: plain loops over elements at any alignment, which the compiler
// vectorises for whatever instruction set the function around them names. For the kernels' own sources.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/check.hpp"
#include "base/types.hpp"
#include "kernels/arithmetic.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/intrinsics.hpp"

// Alone, a loop would be compiled for the portable instruction set.
#define TELEGRAD_INTO_CALLER [[gnu::always_inline]] inline

namespace telegrad::kernels {

/// An element somewhere in bytes.
template <class V>
class [[gnu::packed, gnu::may_alias]] Element {
 public:
  V get() const { return std::bit_cast<V>(Stored(stored_)); }
  void set(V value) { stored_ = std::bit_cast<Stored>(value); }

 private:
  using Stored = std::conditional_t<NarrowFloat<V>, std::uint16_t, V>;  // only members of plain types can be packed
  Stored stored_;
};

template <class V>
const Element<V>* elements(const std::byte* bytes) {
  return reinterpret_cast<const Element<V>*>(bytes);
}
template <class V>
Element<V>* elements(std::byte* bytes) {
  return reinterpret_cast<Element<V>*>(bytes);
}

/// That of the two parts of a complex number; any other as it is.
inline DType part_of(DType dtype) {
  return dtype == DType::c64 ? DType::f32 : dtype == DType::c128 ? DType::f64 : dtype;
}

/// Calls body(V{}) for a dtype of floats or signed integers; CHECKs that it is one.
template <class Body>
void on_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::f32: return body(float{});
    case DType::f64: return body(double{});
    case DType::f16: return body(f16{});
    case DType::bf16: return body(bf16{});
    case DType::i8: return body(std::int8_t{});
    case DType::i16: return body(std::int16_t{});
    case DType::i32: return body(std::int32_t{});
    case DType::i64: return body(std::int64_t{});
    default: check_failed("dtype is of floats or signed integers", __FILE__, __LINE__);
  }
}

#ifdef TELEGRAD_KERNELS_X86

// Halves are converted by instructions that the compiler does not find by itself, so many at a time.
inline constexpr std::size_t kHalves = 16;

TELEGRAD_AVX2 inline void widen(const std::byte* from, float (&to)[kHalves]) {
  const auto* const halves = reinterpret_cast<const __m128i*>(from);
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(halves)));
  _mm256_storeu_ps(to + 8, _mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
}

/// NaNs must be canonical: they keep their payload.
TELEGRAD_AVX2 inline void narrow(const float (&from)[kHalves], std::byte* to) {
  auto* const halves = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(halves, _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(_mm256_loadu_ps(from + 8), _MM_FROUND_TO_NEAREST_INT));
}

#endif

}  // namespace telegrad::kernels
