#include "kernels/merge.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "base/check.hpp"
#include "kernels/arithmetic.hpp"
#include "kernels/merge_avx2.hpp"
#include "kernels/merge_avx512.hpp"
#include "kernels/operations.hpp"

namespace telegrad::kernels {
namespace {

template <class V>
using BitsOf = std::make_unsigned_t<typename Format<V>::Bits>;

// All ones or zero. Not `condition ? ~0 : 0`: GCC makes a branch of that.
std::uint32_t mask_of(bool condition) { return 0U - static_cast<std::uint32_t>(condition); }

// `value` where mask is all ones, `other` where it is zero.
template <class V>
V masked(V value, V other, std::uint32_t mask) {
  using Bits = BitsOf<V>;
  const auto fitting = static_cast<Bits>(static_cast<typename Format<V>::Bits>(static_cast<std::int32_t>(mask)));
  return std::bit_cast<V>(
      static_cast<Bits>((std::bit_cast<Bits>(value) & fitting) | (std::bit_cast<Bits>(other) & ~fitting)));
}

template <class V>
void check(const Entries<V>& entries) {
  TELEGRAD_CHECK(entries.indices.size() == entries.values.size());
}

template <class V>
void check(const EntriesOut<V>& out) {
  TELEGRAD_CHECK(out.indices.size() == out.values.size());
}

// Entries of one input only: their bits, a NaN made canonical.
template <class Combine, class V>
std::size_t append(Entries<V> rest, EntriesOut<V> out, std::size_t count) {
  if (rest.empty()) return count;
  std::memcpy(out.indices.data() + count, rest.indices.data(), rest.size() * sizeof(std::uint32_t));
  for (std::size_t i = 0; i < rest.size(); ++i) {
    out.values[count + i] = Combine::of(rest.values[i], Combine::template kNeutral<V>);
  }
  return count + rest.size();
}

// Merges a beginning, see merge_keys() and merge_beginning_avx2(): portably none.
template <class V>
using BeginningFunction = std::size_t(Entries<V> a, Entries<V> b, EntriesOut<V> out);

template <class V>
std::size_t no_beginning(Entries<V>, Entries<V>, EntriesOut<V>) {
  return 0;
}

template <class Combine, class V>
constexpr Variants<BeginningFunction<V>> variants_of_beginning() {
#ifdef TELEGRAD_KERNELS_X86
  if constexpr (sizeof(V) <= 4) return {no_beginning<V>, merge_beginning_avx2<Combine, V>, merge_keys<Combine, V>};
#endif
  return {no_beginning<V>};
}
template <class Combine, class V>
constexpr Variants<BeginningFunction<V>> kBeginning = variants_of_beginning<Combine, V>();

// Which input comes next is a coin toss that no branch predictor wins, so nothing branches on it: both heads are read,
// both indices step by a comparison's result, and the head not taken counts as neutral. The heads' indices
// are carried in registers and the next ones read ahead: otherwise each step would wait for a load.
template <class Combine, class V>
std::size_t merge_with(Entries<V> a, Entries<V> b, EntriesOut<V> out) {
  constexpr V kNeutral = Combine::template kNeutral<V>;
  check(a);
  check(b);
  check(out);
  TELEGRAD_CHECK(out.capacity() >= a.size() + b.size());
  std::size_t count = kBeginning<Combine, V>(a, b, out);
  const std::uint64_t done = count == 0 ? 0 : std::uint64_t{out.indices[count - 1]} + 1;  // all indices below
  auto i = static_cast<std::size_t>(std::ranges::lower_bound(a.indices, done) - a.indices.begin());
  auto j = static_cast<std::size_t>(std::ranges::lower_bound(b.indices, done) - b.indices.begin());
  TELEGRAD_CHECK(count + (a.size() - i) + (b.size() - j) <= out.capacity());  // not of runs that are in no order
  const auto emit = [&](std::uint32_t left, std::uint32_t right, std::uint32_t take_a, std::uint32_t take_b) {
    out.indices[count] = std::min(left, right);
    out.values[count] = Combine::of(masked(a.values[i], kNeutral, take_a), masked(b.values[j], kNeutral, take_b));
    ++count;
    i += take_a & 1U;
    j += take_b & 1U;
  };
  if (i < a.size() && j < b.size()) {
    std::uint32_t left = a.indices[i];
    std::uint32_t right = b.indices[j];
    while (i + 1 < a.size() && j + 1 < b.size()) {
      const std::uint32_t next_left = a.indices[i + 1];
      const std::uint32_t next_right = b.indices[j + 1];
      const std::uint32_t take_a = mask_of(left <= right);
      const std::uint32_t take_b = mask_of(right <= left);
      emit(left, right, take_a, take_b);
      left ^= (left ^ next_left) & take_a;
      right ^= (right ^ next_right) & take_b;
    }
  }
  while (i < a.size() && j < b.size()) {
    const std::uint32_t left = a.indices[i];
    const std::uint32_t right = b.indices[j];
    emit(left, right, mask_of(left <= right), mask_of(right <= left));
  }
  count = append<Combine>(a.subrun(i, a.size() - i), out, count);
  return append<Combine>(b.subrun(j, b.size() - j), out, count);
}

}  // namespace

template <class V>
std::size_t merge(Reduction reduction, Entries<V> a, Entries<V> b, EntriesOut<V> out) {
  return on_operation(reduction, [&]<class Combine>(Combine) { return merge_with<Combine>(a, b, out); });
}

namespace reference {

template <class V>
std::size_t merge(Reduction reduction, Entries<V> a, Entries<V> b, EntriesOut<V> out) {
  return on_operation(reduction, [&]<class Combine>(Combine) {
    constexpr V kNeutral = Combine::template kNeutral<V>;
    std::size_t i = 0;
    std::size_t j = 0;
    std::size_t count = 0;
    while (i < a.size() || j < b.size()) {
      const bool take_a = j == b.size() || (i < a.size() && a.indices[i] <= b.indices[j]);
      const bool take_b = i == a.size() || (j < b.size() && b.indices[j] <= a.indices[i]);
      out.indices[count] = take_a ? a.indices[i] : b.indices[j];
      out.values[count] = Combine::of(take_a ? a.values[i] : kNeutral, take_b ? b.values[j] : kNeutral);
      i += take_a ? 1 : 0;
      j += take_b ? 1 : 0;
      ++count;
    }
    return count;
  });
}

}  // namespace reference

#define TELEGRAD_INSTANTIATE(V)                                                   \
  template std::size_t merge(Reduction, Entries<V>, Entries<V>, EntriesOut<V>);   \
  template std::size_t reference::merge(Reduction, Entries<V>, Entries<V>, EntriesOut<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad::kernels
