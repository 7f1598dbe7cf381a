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
// The compiler finds in these the pattern of an instruction that fuses, -ffp-contract=off or not: bits would differ between
// processors. The portable instruction set has none.
template <>
constexpr Variants<ReduceFunction> kReduce<Product, Complex<float>>{reduce_portable<Product, Complex<float>>};
template <>
constexpr Variants<ReduceFunction> kReduce<Product, Complex<double>>{reduce_portable<Product, Complex<double>>};

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

// Calls body(V{}) with the unsigned integer of this many bytes.
template <class Body>
void on_width(std::size_t bytes, const Body& body) {
  switch (bytes) {
    case 1: return body(std::uint8_t{});
    case 2: return body(std::uint16_t{});
    case 4: return body(std::uint32_t{});
    case 8: return body(std::uint64_t{});
    default: check_failed("there is an integer of this width", __FILE__, __LINE__);
  }
}

// Booleans are true or not, whatever their byte: only logical reductions are theirs.
Reduction of_booleans(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
    case Reduction::max:
    case Reduction::bor: return Reduction::lor;
    case Reduction::prod:
    case Reduction::min:
    case Reduction::band: return Reduction::land;
    case Reduction::bxor: return Reduction::lxor;
    default: return reduction;
  }
}

// Calls body(Combine{}, V{}). Types whose results have the same bits share a function: signed and unsigned integers but
// for min and max, all widths of a bitwise reduction, and complex numbers, but for products, that of their parts.
template <class Body>
void on_function(DType dtype, Reduction reduction, const Body& body) {
  if (dtype == DType::boolean) reduction = of_booleans(reduction);
  switch (reduction) {
    case Reduction::band: return body(BitwiseAnd{}, std::uint8_t{});
    case Reduction::bor: return body(BitwiseOr{}, std::uint8_t{});
    case Reduction::bxor: return body(BitwiseXor{}, std::uint8_t{});
    case Reduction::land: return on_width(size_of(dtype), [&]<class V>(V) { body(LogicalAnd{}, V{}); });
    case Reduction::lor: return on_width(size_of(dtype), [&]<class V>(V) { body(LogicalOr{}, V{}); });
    case Reduction::lxor: return on_width(size_of(dtype), [&]<class V>(V) { body(LogicalXor{}, V{}); });
    default: break;
  }
  if (reduction == Reduction::prod && dtype == DType::c64) return body(Product{}, Complex<float>{});
  if (reduction == Reduction::prod && dtype == DType::c128) return body(Product{}, Complex<double>{});
  if (is_unsigned(dtype)) {
    return on_width(size_of(dtype), [&]<class V>(V) {
      if (reduction == Reduction::min) return body(Minimum{}, V{});
      if (reduction == Reduction::max) return body(Maximum{}, V{});
      using Signed = std::make_signed_t<V>;
      reduction == Reduction::prod ? body(Product{}, Signed{}) : body(Sum{}, Signed{});
    });
  }
  on_type(part_of(dtype), [&]<class V>(V) {
    on_operation(reduction, [&]<class Combine>(Combine) { body(Combine{}, V{}); });
  });
}

template <class Way>
void reduce_as(DType dtype, Reduction reduction, ConstBytes a, ConstBytes b, Bytes out) {
  TELEGRAD_CHECK(a.size() == b.size() && a.size() == out.size() && a.size() % size_of(dtype) == 0);
  TELEGRAD_CHECK(has_reduction(dtype, reduction == Reduction::avg ? Reduction::sum : reduction));
  on_function(dtype, reduction,
              [&]<class Combine, class V>(Combine, V) { Way::template run<Combine, V>(a, b, out); });
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
