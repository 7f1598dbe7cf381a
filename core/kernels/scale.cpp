#include "kernels/scale.hpp"

#include <cstring>

#include "base/check.hpp"
#include "kernels/elementwise.hpp"

namespace telegrad::kernels {
namespace {

template <class V>
using ScaleFunction = void(std::byte* values, Factor<V> factor, std::size_t count);

template <class V>
TELEGRAD_INTO_CALLER void scale_all(std::byte* values, Factor<V> factor, std::size_t count) {
  auto* const all = elements<V>(values);
  for (std::size_t i = 0; i < count; ++i) all[i].set(times(all[i].get(), factor));
}

template <class V>
void scale_portable(std::byte* values, Factor<V> factor, std::size_t count) {
  scale_all<V>(values, factor, count);
}

#ifdef TELEGRAD_KERNELS_X86

template <class V>
TELEGRAD_AVX2 void scale_avx2(std::byte* values, Factor<V> factor, std::size_t count) {
  scale_all<V>(values, factor, count);
}

template <class V>
TELEGRAD_AVX512 void scale_avx512(std::byte* values, Factor<V> factor, std::size_t count) {
  scale_all<V>(values, factor, count);
}

TELEGRAD_AVX2 void scale_halves(std::byte* values, float factor, std::size_t count) {
  std::size_t i = 0;
  for (; i + kHalves <= count; i += kHalves) {
    float wide[kHalves];
    widen(values + i * sizeof(f16), wide);
    for (float& value : wide) value = times(value, factor);
    narrow(wide, values + i * sizeof(f16));
  }
  scale_all<f16>(values + i * sizeof(f16), factor, count - i);
}

template <class V>
constexpr Variants<ScaleFunction<V>> kScale{scale_portable<V>, scale_avx2<V>, scale_avx512<V>};
template <>
constexpr Variants<ScaleFunction<f16>> kScale<f16>{scale_portable<f16>, scale_halves};

#else

template <class V>
constexpr Variants<ScaleFunction<V>> kScale{scale_portable<V>};

#endif

// Calls body(V{}, factor, count).
template <class Body>
void on_scalable(DType dtype, Bytes values, double factor, const Body& body) {
  TELEGRAD_CHECK(values.size() % size_of(dtype) == 0);
  on_type(part_of(dtype), [&]<class V>(V) {
    TELEGRAD_CHECK(!std::is_integral_v<V>);
    if constexpr (!std::is_integral_v<V>) body(V{}, static_cast<Factor<V>>(factor), values.size() / sizeof(V));
  });
}

}  // namespace

void scale(DType dtype, Bytes values, double factor) {
  on_scalable(dtype, values, factor, [&]<class V>(V, Factor<V> rounded, std::size_t count) {
    kScale<V>(values.data(), rounded, count);
  });
}

void reference::scale(DType dtype, Bytes values, double factor) {
  on_scalable(dtype, values, factor, [&]<class V>(V, Factor<V> rounded, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      V value;
      std::memcpy(&value, values.data() + i * sizeof(V), sizeof(V));
      value = times(value, rounded);
      std::memcpy(values.data() + i * sizeof(V), &value, sizeof(V));
    }
  });
}

}  // namespace telegrad::kernels
