#pragma once
// Entries into dense vectors. `base` is the index of dense[0], so that a slice of a vector can be written.
// V is float, double, bf16 or f16. Entries must be strictly increasing and lie in the slice: only the ends are CHECKed.

#include <cstdint>
#include <span>

#include "base/types.hpp"
#include "kernels/entries.hpp"

namespace telegrad::kernels {

/// dense[i] = value
template <class V>
void fill(std::span<V> dense, V value);

/// dense[index - base] = dense[index - base] ∘ value; the sum for an average.
template <class V>
void scatter_reduce(Reduction reduction, std::span<V> dense, Entries<V> entries, std::uint64_t base = 0);

/// dense = the entries times `factor`, and `absent` elsewhere.
template <class V>
void expand(std::span<V> dense, Entries<V> entries, V absent, double factor = 1.0, std::uint64_t base = 0);

namespace reference {
template <class V>
void scatter_reduce(Reduction reduction, std::span<V> dense, Entries<V> entries, std::uint64_t base = 0);
template <class V>
void expand(std::span<V> dense, Entries<V> entries, V absent, double factor = 1.0, std::uint64_t base = 0);
}  // namespace reference

}  // namespace telegrad::kernels
