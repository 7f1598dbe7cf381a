#pragma once
// A sum's values for somebody who knows some of them, as nobody else has added to what he gave: those are left out, and put
// back where they come. V is float, double, bf16 or f16.

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/entries.hpp"

namespace telegrad::kernels {

/// Marks are as marks.hpp has them. Copies the sum's values to `rest` but for those that have, bit by bit, the value that `given` has at their index, and
/// marks these among `given`. Returns how many it copied. All given indices are in the sum, `rest` is as long as that, and
/// `known` has mark_words(given.size()) words (CHECKed).
template <class V>
std::size_t leave_out(Entries<V> sum, Entries<V> given, std::span<std::uint64_t> known, std::span<V> rest);

/// The same of a sum of which it is known who gave its entries (reduce_sorted_of()), for the one of number `giver`: what only he
/// gave is as he gave it, unless it is NaN. He has given as many entries as `known` has bits for, `entries` (CHECKed).
template <class V>
std::size_t leave_out_of(std::span<const V> sum, std::span<const std::uint8_t> givers, std::size_t giver, std::size_t entries,
                         std::span<std::uint64_t> known, std::span<V> rest);

/// How many are marked, if no mark is beyond the last entry; else more than `entries`.
std::size_t count_known(std::span<const std::uint64_t> known, std::size_t entries);

/// values[i] = given's value at indices[i] where that is marked as known, and the next one of `rest` elsewhere. False, and
/// then values are none, where an index of `given` is not among `indices`: all of them are in a sum. `values` is as long as `indices`, which is as many as `rest` has and are marked (CHECKed).
template <class V>
bool put_back(std::span<const std::uint32_t> indices, Entries<V> given, std::span<const std::uint64_t> known,
              std::span<const V> rest, std::span<V> values);

namespace reference {
template <class V>
std::size_t leave_out(Entries<V> sum, Entries<V> given, std::span<std::uint64_t> known, std::span<V> rest);
template <class V>
std::size_t leave_out_of(std::span<const V> sum, std::span<const std::uint8_t> givers, std::size_t giver,
                         std::span<std::uint64_t> known, std::span<V> rest);
template <class V>
bool put_back(std::span<const std::uint32_t> indices, Entries<V> given, std::span<const std::uint64_t> known,
              std::span<const V> rest, std::span<V> values);
}  // namespace reference

}  // namespace telegrad::kernels
