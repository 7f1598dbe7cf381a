#pragma once
// Entries of a range as marks, a bit for each index, and their values in ascending order. Where a range is fairly full that
// takes less than its indices, and becomes dense as fast as memory is read. V is float, double, bf16 or f16.

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/entries.hpp"

namespace telegrad::kernels {

/// Words of marks of `range` indices: bit i % 64 of word i / 64 is that of the i-th; what is beyond the last one is zero.
constexpr std::size_t mark_words(std::size_t range) { return (range + 63) / 64; }

/// marks = those of `indices`, counted from `base`. False, and then the marks are none of theirs, unless the indices are
/// strictly increasing and in [base, base + range). Somebody may change them meanwhile: the number of marks is then
/// another, or they are those of some such indices. `marks` has mark_words(range) words (CHECKed).
bool mark(std::span<const std::uint32_t> indices, std::uint64_t base, std::size_t range, std::span<std::uint64_t> marks);

/// Those of `range` indices from `begin` on, of marks that have so many (CHECKed).
void slice_marks(std::span<const std::uint64_t> marks, std::size_t begin, std::size_t range, std::span<std::uint64_t> slice);

/// How many there are.
std::size_t count_marks(std::span<const std::uint64_t> marks);

/// dense[i] = the next value where i is marked, `absent` elsewhere. There are as many values as marks, and as many marks as
/// dense.size() has (CHECKed).
template <class V>
void expand_marks(std::span<V> dense, std::span<const std::uint64_t> marks, std::span<const V> values, V absent);

namespace reference {
bool mark(std::span<const std::uint32_t> indices, std::uint64_t base, std::size_t range, std::span<std::uint64_t> marks);
template <class V>
void expand_marks(std::span<V> dense, std::span<const std::uint64_t> marks, std::span<const V> values, V absent);
}  // namespace reference

}  // namespace telegrad::kernels
