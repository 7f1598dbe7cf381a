#include <algorithm>
#include <array>
#include <bit>

#include "base/check.hpp"
#include "kernels/arithmetic.hpp"
#include "kernels/merge.hpp"
#include "kernels/pack_avx2.hpp"
#include "kernels/pack_avx512.hpp"

namespace telegrad::kernels {
namespace {

template <class V>
using BitsOf = std::make_unsigned_t<typename Format<V>::Bits>;

// Which bits of an element tell whether it is absent: those of zero may differ in the sign.
template <class V>
typename Format<V>::Bits bits_looked_at(V absent) {
  return is_zero(absent) ? Format<V>::kMagnitude : typename Format<V>::Bits{-1};
}

// Where a kernel goes on: what is done of the input, and how many entries that has.
struct Progress {
  std::size_t done = 0;
  std::size_t count = 0;
};

template <class V>
using CompactFunction = Progress(std::span<const V> dense, V absent, std::uint32_t index_offset, EntriesOut<V> out);

// All that is left: the last elements, or what no longer fits.
template <class V>
std::size_t compact_rest(std::span<const V> dense, V absent, std::uint32_t index_offset, EntriesOut<V> out,
                         Progress progress) {
  using Bits = BitsOf<V>;
  constexpr std::size_t kBlock = 32;
  const auto none = std::bit_cast<Bits>(absent);
  const auto looked_at = static_cast<Bits>(bits_looked_at(absent));
  const auto differing = [&](V value) {
    return static_cast<Bits>((std::bit_cast<Bits>(value) ^ none) & looked_at);
  };
  std::size_t count = progress.count;
  for (std::size_t begin = progress.done; begin < dense.size(); begin += kBlock) {
    const std::span<const V> block = dense.subspan(begin, std::min(kBlock, dense.size() - begin));
    if (block.size() == kBlock) {
      Bits any = 0;
      for (std::size_t j = 0; j < kBlock; ++j) any = static_cast<Bits>(any | differing(block[j]));
      if (any == 0) continue;
    }
    std::uint32_t marks = 0;
    for (std::size_t j = 0; j < block.size(); ++j) marks |= (differing(block[j]) != 0 ? 1U : 0U) << j;
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

template <class V>
Progress compact_portable(std::span<const V>, V, std::uint32_t, EntriesOut<V>) {
  return {};
}

#ifdef TELEGRAD_KERNELS_X86

template <class V>
TELEGRAD_AVX2 Progress compact_avx2(std::span<const V> dense, V absent, std::uint32_t index_offset, EntriesOut<V> out) {
  constexpr std::size_t kEight = 8;
  constexpr std::size_t kEights = 4;  // are looked at before any is packed: most have nothing where few elements have
  const auto none = std::bit_cast<typename Format<V>::Bits>(absent);
  const auto looked_at = bits_looked_at(absent);
  Progress at;
  for (; at.done + kEights * kEight <= dense.size() && at.count + (kEights + 1) * kEight <= out.capacity();
       at.done += kEights * kEight) {
    const V* const from = dense.data() + at.done;
    std::array<std::uint32_t, kEights> marks;
    for (std::size_t i = 0; i < kEights; ++i) marks[i] = differing8(from + i * kEight, none, looked_at);
    if ((marks[0] | marks[1] | marks[2] | marks[3]) == 0) continue;
    for (std::size_t i = 0; i < kEights; ++i) {
      const std::uint32_t first = index_offset + static_cast<std::uint32_t>(at.done + i * kEight);
      at.count += pack8_loosely(from + i * kEight, marks[i], first, out.indices.data() + at.count, out.values.data() + at.count);
    }
  }
  return at;
}

template <class V>
TELEGRAD_AVX512 Progress compact_avx512(std::span<const V> dense, V absent, std::uint32_t index_offset,
                                        EntriesOut<V> out) {
  const auto none = std::bit_cast<typename Format<V>::Bits>(absent);
  const auto looked_at = bits_looked_at(absent);
  Progress at;
  // Ahead: what the cache would fetch by itself, but too late.
  constexpr std::size_t kAhead = 2048 / sizeof(V);
  for (; at.done + 2 * kGroup <= dense.size() && at.count + 2 * kGroup <= out.capacity(); at.done += 2 * kGroup) {
    const V* const from = dense.data() + at.done;
    __builtin_prefetch(from + kAhead);
    const std::uint32_t first = differing16(from, none, looked_at);
    const std::uint32_t second = differing16(from + kGroup, none, looked_at);
    if ((first | second) == 0) continue;
    const std::uint32_t index = index_offset + static_cast<std::uint32_t>(at.done);
    at.count += pack16(from, first, index, out.indices.data() + at.count, out.values.data() + at.count);
    at.count += pack16(from + kGroup, second, index + static_cast<std::uint32_t>(kGroup),
                       out.indices.data() + at.count, out.values.data() + at.count);
  }
  return at;
}

template <class V>
constexpr Variants<CompactFunction<V>> kCompact{compact_portable<V>, compact_avx2<V>, compact_avx512<V>};

#else

template <class V>
constexpr Variants<CompactFunction<V>> kCompact{compact_portable<V>};

#endif

}  // namespace

template <class V>
std::size_t compact(std::span<const V> dense, V absent, std::uint32_t index_offset, EntriesOut<V> out) {
  TELEGRAD_CHECK(out.indices.size() == out.values.size());
  TELEGRAD_CHECK(dense.size() + index_offset <= std::uint64_t{1} << 32);
  const Progress progress = kCompact<V>(dense, absent, index_offset, out);
  return compact_rest(dense, absent, index_offset, out, progress);
}

namespace reference {

template <class V>
std::size_t compact(std::span<const V> dense, V absent, std::uint32_t index_offset, EntriesOut<V> out) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < dense.size(); ++i) {
    if (static_cast<Factor<V>>(dense[i]) == static_cast<Factor<V>>(absent)) continue;
    if (count < out.capacity()) {
      out.indices[count] = index_offset + static_cast<std::uint32_t>(i);
      out.values[count] = dense[i];
    }
    ++count;
  }
  return count;
}

}  // namespace reference

#define TELEGRAD_INSTANTIATE(V)                                                          \
  template std::size_t compact(std::span<const V>, V, std::uint32_t, EntriesOut<V>);     \
  template std::size_t reference::compact(std::span<const V>, V, std::uint32_t, EntriesOut<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad::kernels
