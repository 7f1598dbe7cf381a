#include "kernels/reduce.hpp"

#include <cstring>

#include "base/check.hpp"
#include "kernels/elementwise.hpp"
#include "kernels/operations.hpp"

namespace telegrad::kernels {
namespace {

using ReduceFunction = void(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count);

template <class Combine, class V>
TELEGRAD_INTO_CALLER void reduce_all(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count) {
  const auto* const left = elements<V>(a);
  const auto* const right = elements<V>(b);
  auto* const result = elements<V>(out);
#pragma GCC ivdep  // `out` may be `a` or `b`
  for (std::size_t i = 0; i < count; ++i) result[i].set(Combine::of(left[i].get(), right[i].get()));
}

template <class Combine, class V>
void reduce_portable(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count) {
  reduce_all<Combine, V>(a, b, out, count);
}

#ifdef TELEGRAD_KERNELS_X86

template <class Combine, class V>
TELEGRAD_AVX2 void reduce_avx2(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count) {
  reduce_all<Combine, V>(a, b, out, count);
}

template <class Combine, class V>
TELEGRAD_AVX512 void reduce_avx512(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count) {
  reduce_all<Combine, V>(a, b, out, count);
}

template <class Combine>
TELEGRAD_AVX2 void reduce_halves(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + kHalves <= count; i += kHalves) {
    float left[kHalves], right[kHalves];
    widen(a + i * sizeof(f16), left);
    widen(b + i * sizeof(f16), right);
    for (std::size_t j = 0; j < kHalves; ++j) left[j] = Combine::of(left[j], right[j]);
    narrow(left, out + i * sizeof(f16));
  }
  reduce_all<Combine, f16>(a + i * sizeof(f16), b + i * sizeof(f16), out + i * sizeof(f16), count - i);
}

template <class Combine, class V>
constexpr Variants<ReduceFunction> kReduce{reduce_portable<Combine, V>, reduce_avx2<Combine, V>,
                                           reduce_avx512<Combine, V>};
template <>
constexpr Variants<ReduceFunction> kReduce<Sum, f16>{reduce_portable<Sum, f16>, reduce_halves<Sum>};
template <>
constexpr Variants<ReduceFunction> kReduce<Product, f16>{reduce_portable<Product, f16>, reduce_halves<Product>};

#else

template <class Combine, class V>
constexpr Variants<ReduceFunction> kReduce{reduce_portable<Combine, V>};

#endif

template <class Combine, class V>
void reduce_one_by_one(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    V left, right;
    std::memcpy(&left, a + i * sizeof(V), sizeof(V));
    std::memcpy(&right, b + i * sizeof(V), sizeof(V));
    const V result = Combine::of(left, right);
    std::memcpy(out + i * sizeof(V), &result, sizeof(V));
  }
}

struct Fast {
  template <class Combine, class V>
  static void run(ConstBytes a, ConstBytes b, Bytes out) {
    kReduce<Combine, V>(a.data(), b.data(), out.data(), a.size() / sizeof(V));
  }
};
struct OneByOne {
  template <class Combine, class V>
  static void run(ConstBytes a, ConstBytes b, Bytes out) {
    reduce_one_by_one<Combine, V>(a.data(), b.data(), out.data(), a.size() / sizeof(V));
  }
};

template <class Way>
void reduce_as(DType dtype, Reduction reduction, ConstBytes a, ConstBytes b, Bytes out) {
  TELEGRAD_CHECK(a.size() == b.size() && a.size() == out.size() && a.size() % size_of(dtype) == 0);
  TELEGRAD_CHECK(reduction != Reduction::none);
  on_type(dtype, [&]<class V>(V) {
    on_operation(reduction, [&]<class Combine>(Combine) { Way::template run<Combine, V>(a, b, out); });
  });
}

}  // namespace

void reduce_to(DType dtype, Reduction reduction, ConstBytes a, ConstBytes b, Bytes out) {
  reduce_as<Fast>(dtype, reduction, a, b, out);
}

void add(DType dtype, Bytes accumulator, ConstBytes addend) {
  reduce_to(dtype, Reduction::sum, accumulator, addend, accumulator);
}

void reference::reduce_to(DType dtype, Reduction reduction, ConstBytes a, ConstBytes b, Bytes out) {
  reduce_as<OneByOne>(dtype, reduction, a, b, out);
}

}  // namespace telegrad::kernels
