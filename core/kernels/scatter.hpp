#pragma once
// Entries into dense vectors. `base` is the index of dense[0], so that a slice of a vector can be written.
// V is float or bf16. Entries must be strictly increasing and lie in the slice: only the ends are CHECKed.

#include <cstdint>
#include <span>

#include "base/types.hpp"
#include "kernels/entries.hpp"

namespace telegrad::kernels {

void fill_zero(Bytes bytes);

/// dense[index - base] += value
template <class V>
void scatter_add(std::span<V> dense, Entries<V> entries, std::uint64_t base = 0);

/// dense[index - base] = value; what no entry names stays as it is.
template <class V>
void scatter_set(std::span<V> dense, Entries<V> entries, std::uint64_t base = 0);

/// dense = the entries times `factor`, and zero elsewhere.
template <class V>
void expand(std::span<V> dense, Entries<V> entries, float factor = 1.0F, std::uint64_t base = 0);

namespace reference {
template <class V>
void scatter_add(std::span<V> dense, Entries<V> entries, std::uint64_t base = 0);
template <class V>
void scatter_set(std::span<V> dense, Entries<V> entries, std::uint64_t base = 0);
template <class V>
void expand(std::span<V> dense, Entries<V> entries, float factor = 1.0F, std::uint64_t base = 0);
}  // namespace reference

}  // namespace telegrad::kernels
