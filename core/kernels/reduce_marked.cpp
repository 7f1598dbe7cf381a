// In chunks that stay in the first-level cache. Each input's values are expanded there and reduced; sums of f32 and f64 in AVX-512
// expand a few inputs in registers, which takes half the time of what is expanded to memory first.
#include "kernels/reduce_marked.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/intrinsics.hpp"
#include "kernels/marks.hpp"
#include "kernels/operations.hpp"
#include "kernels/reduce.hpp"

namespace telegrad::kernels {
namespace {

constexpr std::size_t kWord = 64;
constexpr std::size_t kChunkBytes = std::size_t{8} << 10;

template <class V>
void check_inputs(std::span<const MarkedValues<V>> inputs, std::size_t range) {
  TELEGRAD_CHECK(inputs.size() >= 2);
  for (const auto& [marks, values] : inputs) {
    TELEGRAD_CHECK(marks.empty() ? values.size() == range : marks.size() == mark_words(range));
    TELEGRAD_CHECK(marks.empty() || range % kWord == 0 || marks.back() >> range % kWord == 0);
  }
}

// Values of the first `range` elements.
template <class V>
std::size_t count_checked(const MarkedValues<V>& input, std::size_t range) {
  const std::size_t count = input.marks.empty() ? range : count_marks(input.marks.first(mark_words(range)));
  TELEGRAD_CHECK(count <= input.values.size());
  return count;
}

// The first `range` elements, which are taken off the input.
template <class V>
MarkedValues<V> take(MarkedValues<V>& input, std::size_t range) {
  const std::size_t count = count_checked(input, range);
  const MarkedValues<V> first{input.marks.first(std::min(input.marks.size(), mark_words(range))), input.values.first(count)};
  input.marks = input.marks.subspan(first.marks.size());
  input.values = input.values.subspan(count);
  return first;
}

template <class V>
void expand(std::span<V> dense, const MarkedValues<V>& input, V absent) {
  if (!input.marks.empty()) return expand_marks(dense, input.marks, input.values, absent);
  if (input.values.data() != dense.data()) std::ranges::copy(input.values, dense.begin());
}

template <class V>
void reduce_one_after_another(Reduction reduction, std::span<MarkedValues<V>> inputs, std::span<V> out) {
  constexpr std::size_t kChunk = kChunkBytes / sizeof(V);
  alignas(64) std::array<std::byte, kChunkBytes> room;
  const V neutral =
      on_operation(reduction, []<class Combine>(Combine) { return Combine::template kNeutral<V>; });
  for (; !out.empty(); out = out.subspan(std::min(kChunk, out.size()))) {
    const std::span<V> sum = out.first(std::min(kChunk, out.size()));
    const std::span<V> expanded(reinterpret_cast<V*>(room.data()), sum.size());
    const Bytes bytes = std::as_writable_bytes(sum);
    expand(sum, take(inputs[0], sum.size()), absent_element<V>(reduction));
    for (MarkedValues<V>& input : inputs.subspan(1)) {
      const MarkedValues<V> next = take(input, sum.size());
      if (!next.marks.empty()) expand(expanded, next, neutral);
      const std::span<const V> addend = next.marks.empty() ? next.values : expanded;
      reduce_to(dtype_of<V>, reduction, bytes, std::as_bytes(addend), bytes);
    }
  }
}

// Sums some leading words of elements, which are taken off the inputs; returns how many.
template <class V>
using SumFunction = std::size_t(std::span<MarkedValues<V>> inputs, V* out, std::size_t words);

template <class V>
std::size_t sum_portable(std::span<MarkedValues<V>>, V*, std::size_t) {
  return 0;
}

#ifdef TELEGRAD_KERNELS_X86

template <class V>
struct Lanes;  // of a vector

template <>
struct Lanes<float> {
  using Vector = __m512;
  using Mask = __mmask16;
  TELEGRAD_AVX512 static Vector load(const float* from) { return _mm512_loadu_ps(from); }
  TELEGRAD_AVX512 static Vector load(const float* from, int count) {
    return _mm512_maskz_loadu_ps(static_cast<Mask>(_bzhi_u32(0xffff, static_cast<unsigned>(count))), from);
  }
  TELEGRAD_AVX512 static Vector fill(float value) { return _mm512_set1_ps(value); }
  TELEGRAD_AVX512 static void store(float* to, Vector values) { _mm512_storeu_ps(to, values); }
  TELEGRAD_AVX512 static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  TELEGRAD_AVX512 static Vector expand(Vector absent, Mask marks, Vector values) {
    return _mm512_mask_expand_ps(absent, marks, values);
  }
  TELEGRAD_AVX512 static Vector canonical(Vector values, Vector nan) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q), values, nan);
  }
};

template <>
struct Lanes<double> {
  using Vector = __m512d;
  using Mask = __mmask8;
  TELEGRAD_AVX512 static Vector load(const double* from) { return _mm512_loadu_pd(from); }
  TELEGRAD_AVX512 static Vector load(const double* from, int count) {
    return _mm512_maskz_loadu_pd(static_cast<Mask>(_bzhi_u32(0xff, static_cast<unsigned>(count))), from);
  }
  TELEGRAD_AVX512 static Vector fill(double value) { return _mm512_set1_pd(value); }
  TELEGRAD_AVX512 static void store(double* to, Vector values) { _mm512_storeu_pd(to, values); }
  TELEGRAD_AVX512 static Vector add(Vector a, Vector b) { return _mm512_add_pd(a, b); }
  TELEGRAD_AVX512 static Vector expand(Vector absent, Mask marks, Vector values) {
    return _mm512_mask_expand_pd(absent, marks, values);
  }
  TELEGRAD_AVX512 static Vector canonical(Vector values, Vector nan) {
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(values, values, _CMP_UNORD_Q), values, nan);
  }
};

constexpr std::size_t kInputsAtOnce = 4;
constexpr std::size_t kWordsAtOnce = 32;  // what is summed of more inputs stays in the first-level cache meanwhile

// out = the sum of kInputs inputs, of all but the first ones added to `out`. kReadsOn: values may be read beyond those that are marked.
template <std::size_t kInputs, bool kFirst, bool kReadsOn, class V>
TELEGRAD_AVX512 void sum_inputs(MarkedValues<V>* inputs, V* out, std::size_t words) {
  using Vector = Lanes<V>;
  constexpr std::size_t kLanes = 64 / sizeof(V);
  constexpr std::size_t kVectors = kWord / kLanes;
  constexpr std::size_t kAheadBytes = 4096;  // what the cache would fetch by itself, but too late
  const auto zero = Vector::fill(V(0));
  const auto neutral = Vector::fill(-V(0));
  const auto nan = Vector::fill(std::bit_cast<V>(Format<V>::kNan));
  const std::uint64_t* marks[kInputs];
  const V* values[kInputs];
  for (std::size_t input = 0; input < kInputs; ++input) {
    marks[input] = inputs[input].marks.empty() ? nullptr : inputs[input].marks.data();
    values[input] = inputs[input].values.data();
  }
  for (std::size_t word = 0; word < words; ++word, out += kWord) {
    typename Vector::Vector sum[kVectors];
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kVectors; ++i) sum[i] = kFirst ? zero : Vector::load(out + i * kLanes);
#pragma GCC unroll 4
    for (std::size_t input = 0; input < kInputs; ++input) {
      const std::uint64_t all = marks[input] == nullptr ? ~std::uint64_t{0} : marks[input][word];
      const V* const from = values[input];
      const char* const ahead = reinterpret_cast<const char*>(from) + kAheadBytes;
#pragma GCC unroll 8
      for (std::size_t i = 0; i < kVectors; ++i) {
        __builtin_prefetch(ahead + i * 64);
        const std::uint64_t before = all & ((std::uint64_t{1} << i * kLanes) - 1);
        const auto mask = static_cast<typename Vector::Mask>(all >> i * kLanes);
        const V* const first = from + std::popcount(before);
        const auto next = kReadsOn ? Vector::load(first) : Vector::load(first, std::popcount(mask));
        const bool sets = input == 0 && kFirst;
        const auto expanded = Vector::expand(sets ? zero : neutral, mask, next);
        sum[i] = sets ? expanded : Vector::add(sum[i], expanded);
      }
      values[input] = from + std::popcount(all);
    }
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kVectors; ++i) {
      Vector::store(out + i * kLanes, Vector::canonical(sum[i], nan));
    }
  }
  for (std::size_t input = 0; input < kInputs; ++input) {
    MarkedValues<V>& left = inputs[input];
    left.values = left.values.subspan(static_cast<std::size_t>(values[input] - left.values.data()));
    if (!left.marks.empty()) left.marks = left.marks.subspan(words);
  }
}

template <bool kFirst, bool kReadsOn, class V>
void sum_at_once(std::span<MarkedValues<V>> inputs, V* out, std::size_t words) {
  switch (inputs.size()) {
    case 1: return sum_inputs<1, kFirst, kReadsOn>(inputs.data(), out, words);
    case 2: return sum_inputs<2, kFirst, kReadsOn>(inputs.data(), out, words);
    case 3: return sum_inputs<3, kFirst, kReadsOn>(inputs.data(), out, words);
    default: return sum_inputs<kInputsAtOnce, kFirst, kReadsOn>(inputs.data(), out, words);
  }
}

template <bool kFirst, class V>
void sum_some(std::span<MarkedValues<V>> inputs, V* out, std::size_t words) {
  constexpr std::size_t kLanes = 64 / sizeof(V);  // are read for each vector of elements, where that many are there
  bool reads_on = true;
  for (const MarkedValues<V>& input : inputs) {
    const std::size_t count = count_checked(input, words * kWord);
    reads_on = reads_on && (input.marks.empty() || count + kLanes <= input.values.size());
  }
  (reads_on ? sum_at_once<kFirst, true, V> : sum_at_once<kFirst, false, V>)(inputs, out, words);
}

template <class V>
std::size_t sum_avx512(std::span<MarkedValues<V>> inputs, V* out, std::size_t words) {
  for (std::size_t done = 0; done < words; done += kWordsAtOnce, out += kWordsAtOnce * kWord) {
    const std::size_t now = std::min(kWordsAtOnce, words - done);
    sum_some<true>(inputs.first(std::min(kInputsAtOnce, inputs.size())), out, now);
    for (std::size_t begin = kInputsAtOnce; begin < inputs.size(); begin += kInputsAtOnce) {
      sum_some<false>(inputs.subspan(begin, std::min(kInputsAtOnce, inputs.size() - begin)), out, now);
    }
  }
  return words;
}

#endif

template <class V>
constexpr Variants<SumFunction<V>> variants_of_sum() {
#ifdef TELEGRAD_KERNELS_X86
  if constexpr (std::is_floating_point_v<V>) return {sum_portable<V>, nullptr, sum_avx512<V>};
#endif
  return {sum_portable<V>};
}
template <class V>
constexpr Variants<SumFunction<V>> kSum = variants_of_sum<V>();

}  // namespace

template <class V>
void reduce_marked(Reduction reduction, std::span<const MarkedValues<V>> inputs, std::span<V> out) {
  check_inputs(inputs, out.size());
  std::vector<MarkedValues<V>> left(inputs.begin(), inputs.end());
  std::size_t words = 0;
  if (reduction == Reduction::sum || reduction == Reduction::avg) {
    words = kSum<V>(std::span(left), out.data(), out.size() / kWord);
  }
  reduce_one_after_another(reduction, std::span(left), out.subspan(words * kWord));
  for (const MarkedValues<V>& input : left) TELEGRAD_CHECK(input.values.empty());  // no more than marks
}

namespace reference {

template <class V>
void reduce_marked(Reduction reduction, std::span<const MarkedValues<V>> inputs, std::span<V> out) {
  check_inputs(inputs, out.size());
  on_operation(reduction, [&]<class Combine>(Combine) {
    std::vector<std::size_t> next(inputs.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = absent_element<V>(reduction);
      for (std::size_t input = 0; input < inputs.size(); ++input) {
        const auto& [marks, values] = inputs[input];
        const bool is_there = marks.empty() || (marks[i / kWord] >> i % kWord & 1U) != 0;
        if (input == 0 && is_there) out[i] = values[next[0]++];
        if (input == 0) continue;
        out[i] = Combine::of(out[i], is_there ? values[next[input]++] : Combine::template kNeutral<V>);
      }
    }
  });
}

}  // namespace reference

#define TELEGRAD_INSTANTIATE(V)                                                                   \
  template void reduce_marked(Reduction, std::span<const MarkedValues<V>>, std::span<V>);         \
  template void reference::reduce_marked(Reduction, std::span<const MarkedValues<V>>, std::span<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad::kernels
