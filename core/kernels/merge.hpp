#pragma once
// Reductions of sorted entries, as entries. V is float, double, bf16 or f16.
//
// An index that any input holds stays in the output, also where its sum is zero. A value that only one input holds
// keeps its bits (a NaN becomes the canonical one): an absent one is neutral. merge(r, a, b) has the bits of
// merge(r, b, a).

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.hpp"
#include "kernels/entries.hpp"

namespace telegrad::kernels {

/// out = a ∘ b; the sum for an average. Returns the number of entries. out.capacity() >= a.size() + b.size() (CHECKed) and overlaps neither.
template <class V>
std::size_t merge(Reduction reduction, Entries<V> a, Entries<V> b, EntriesOut<V> out);

/// out = the reduction of all inputs, formed in their order: ((in0 ∘ in1) ∘ in2) ∘ …; the bits that repeated merge()
/// gives, in time that grows with the entries, not with the number of inputs. Returns the number of entries.
/// The capacity must hold them; the sum of the inputs' sizes always does (CHECKed block by block).
template <class V>
std::size_t reduce_sorted(Reduction reduction, std::span<const Entries<V>> inputs, EntriesOut<V> out);

/// The same, and givers[i] becomes which inputs have the i-th index, the first one in the lowest bit. At most kGiversMost inputs,
/// and `givers` as long as the capacity (CHECKed).
inline constexpr std::size_t kGiversMost = 8;
template <class V>
std::size_t reduce_sorted_of(Reduction reduction, std::span<const Entries<V>> inputs, EntriesOut<V> out,
                             std::span<std::uint8_t> givers);
/// Whether that takes less time than finding out for all inputs but one what nobody else has (left_out.hpp): of so many inputs
/// that have `total` entries in `range` indices.
template <class V>
bool givers_pay(Reduction reduction, std::size_t inputs, std::size_t total, std::uint64_t range);

/// The entries of `dense` that are not `absent` (zero stands for both), indices counted from `index_offset`. Returns how
/// many there are; where that is more than the capacity, only the first are written. What is behind them, up to the capacity, is of no
/// use.
template <class V>
std::size_t compact(std::span<const V> dense, V absent, std::uint32_t index_offset, EntriesOut<V> out);

namespace reference {
template <class V>
std::size_t merge(Reduction reduction, Entries<V> a, Entries<V> b, EntriesOut<V> out);
template <class V>
std::size_t reduce_sorted(Reduction reduction, std::span<const Entries<V>> inputs, EntriesOut<V> out);
template <class V>
std::size_t compact(std::span<const V> dense, V absent, std::uint32_t index_offset, EntriesOut<V> out);
}  // namespace reference

}  // namespace telegrad::kernels
