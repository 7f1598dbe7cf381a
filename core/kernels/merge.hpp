#pragma once
// Sums of sorted entries, as entries. V is float or bf16.
//
// An index that any input holds stays in the output, also where its sum is zero. A value that only one input holds
// keeps its bits (a NaN becomes the canonical one), and merge_add(a, b) has the bits of merge_add(b, a).

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/entries.hpp"

namespace telegrad::kernels {

/// out = a + b. Returns the number of entries. out.capacity() >= a.size() + b.size() (CHECKed) and overlaps neither.
template <class V>
std::size_t merge_add(Entries<V> a, Entries<V> b, EntriesOut<V> out);

/// out = the sum of all inputs, formed in their order: ((in0 + in1) + in2) + …; the bits that repeated merge_add
/// gives, in time that grows with the entries, not with the number of inputs. Returns the number of entries.
/// The capacity must hold them; the sum of the inputs' sizes always does (CHECKed block by block).
template <class V>
std::size_t reduce_sorted(std::span<const Entries<V>> inputs, EntriesOut<V> out);

/// The entries of `dense` that are not zero (either zero), indices counted from `index_offset`. Returns how many there
/// are; where that is more than the capacity, only the first are written.
template <class V>
std::size_t compact(std::span<const V> dense, std::uint32_t index_offset, EntriesOut<V> out);

namespace reference {
template <class V>
std::size_t merge_add(Entries<V> a, Entries<V> b, EntriesOut<V> out);
template <class V>
std::size_t reduce_sorted(std::span<const Entries<V>> inputs, EntriesOut<V> out);
template <class V>
std::size_t compact(std::span<const V> dense, std::uint32_t index_offset, EntriesOut<V> out);
}  // namespace reference

}  // namespace telegrad::kernels
