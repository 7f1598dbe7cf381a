#include "kernels/merge.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "base/check.hpp"
#include "kernels/arithmetic.hpp"

namespace telegrad::kernels {
namespace {

template <class V>
using BitsOf = std::conditional_t<sizeof(V) == 4, std::uint32_t, std::uint16_t>;

// All ones or zero. Not `condition ? ~0 : 0`: GCC makes a branch of that.
std::uint32_t mask_of(bool condition) { return 0U - static_cast<std::uint32_t>(condition); }

// `value` where mask is all ones, the neutral element where it is zero.
template <class V>
V masked(V value, std::uint32_t mask) {
  using Bits = BitsOf<V>;
  constexpr Bits kOther = std::bit_cast<Bits>(kNeutral<V>);
  const auto narrow = static_cast<Bits>(mask);
  return std::bit_cast<V>(static_cast<Bits>((std::bit_cast<Bits>(value) & narrow) | (kOther & ~narrow)));
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
template <class V>
std::size_t append(Entries<V> rest, EntriesOut<V> out, std::size_t count) {
  if (rest.empty()) return count;
  std::memcpy(out.indices.data() + count, rest.indices.data(), rest.size() * sizeof(std::uint32_t));
  for (std::size_t i = 0; i < rest.size(); ++i) out.values[count + i] = plus(rest.values[i], kNeutral<V>);
  return count + rest.size();
}

}  // namespace

// Which input comes next is a coin toss that no branch predictor wins, so nothing branches on it: both heads are read,
// both indices step by a comparison's result, and the head not taken counts as neutral. The heads' indices
// are carried in registers and the next ones read ahead: otherwise each step would wait for a load.
template <class V>
std::size_t merge_add(Entries<V> a, Entries<V> b, EntriesOut<V> out) {
  check(a);
  check(b);
  check(out);
  TELEGRAD_CHECK(out.capacity() >= a.size() + b.size());
  std::size_t i = 0;
  std::size_t j = 0;
  std::size_t count = 0;
  const auto emit = [&](std::uint32_t left, std::uint32_t right, std::uint32_t take_a, std::uint32_t take_b) {
    out.indices[count] = std::min(left, right);
    out.values[count] = plus(masked(a.values[i], take_a), masked(b.values[j], take_b));
    ++count;
    i += take_a & 1U;
    j += take_b & 1U;
  };
  if (!a.empty() && !b.empty()) {
    std::uint32_t left = a.indices[0];
    std::uint32_t right = b.indices[0];
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
  count = append(a.subrun(i, a.size() - i), out, count);
  return append(b.subrun(j, b.size() - j), out, count);
}

template <class V>
std::size_t compact(std::span<const V> dense, std::uint32_t index_offset, EntriesOut<V> out) {
  check(out);
  TELEGRAD_CHECK(dense.size() + index_offset <= std::uint64_t{1} << 32);
  constexpr std::size_t kBlock = 32;
  std::size_t count = 0;
  for (std::size_t begin = 0; begin < dense.size(); begin += kBlock) {
    const std::span<const V> block = dense.subspan(begin, std::min(kBlock, dense.size() - begin));
    std::uint32_t any = 0;
    if (block.size() == kBlock) {
      for (std::size_t j = 0; j < kBlock; ++j) any |= std::bit_cast<BitsOf<V>>(block[j]);
      if (any == 0) continue;
    }
    std::uint32_t marks = 0;
    for (std::size_t j = 0; j < block.size(); ++j) {
      const auto magnitude = static_cast<BitsOf<V>>(std::bit_cast<BitsOf<V>>(block[j]) << 1);
      marks |= (magnitude != 0 ? 1U : 0U) << j;
    }
    for (; marks != 0; marks &= marks - 1) {
      const auto j = static_cast<std::size_t>(std::countr_zero(marks));
      if (count < out.capacity()) {
        out.indices[count] = index_offset + static_cast<std::uint32_t>(begin + j);
        out.values[count] = block[j];
      }
      ++count;
    }
  }
  return count;
}

namespace reference {

template <class V>
std::size_t merge_add(Entries<V> a, Entries<V> b, EntriesOut<V> out) {
  std::size_t i = 0;
  std::size_t j = 0;
  std::size_t count = 0;
  while (i < a.size() || j < b.size()) {
    const bool take_a = j == b.size() || (i < a.size() && a.indices[i] <= b.indices[j]);
    const bool take_b = i == a.size() || (j < b.size() && b.indices[j] <= a.indices[i]);
    out.indices[count] = take_a ? a.indices[i] : b.indices[j];
    out.values[count] = plus(take_a ? a.values[i] : kNeutral<V>, take_b ? b.values[j] : kNeutral<V>);
    i += take_a ? 1 : 0;
    j += take_b ? 1 : 0;
    ++count;
  }
  return count;
}

template <class V>
std::size_t compact(std::span<const V> dense, std::uint32_t index_offset, EntriesOut<V> out) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < dense.size(); ++i) {
    if (static_cast<float>(dense[i]) == 0.0F) continue;
    if (count < out.capacity()) {
      out.indices[count] = index_offset + static_cast<std::uint32_t>(i);
      out.values[count] = dense[i];
    }
    ++count;
  }
  return count;
}

}  // namespace reference

#define TELEGRAD_INSTANTIATE(V)                                                                \
  template std::size_t merge_add(Entries<V>, Entries<V>, EntriesOut<V>);                       \
  template std::size_t compact(std::span<const V>, std::uint32_t, EntriesOut<V>);              \
  template std::size_t reference::merge_add(Entries<V>, Entries<V>, EntriesOut<V>);            \
  template std::size_t reference::compact(std::span<const V>, std::uint32_t, EntriesOut<V>);
TELEGRAD_INSTANTIATE(float)
TELEGRAD_INSTANTIATE(bf16)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad::kernels
