#pragma once
// The largest of sorted entries, by magnitude; the others are not thrown away. By its bits a NaN is larger than infinity:
// it is selected, as in local selection (kernels/key.hpp).

#include <bit>
#include <cstdint>

#include "codec/slices.hpp"
#include "codec/sparse_vector.hpp"
#include "kernels/arithmetic.hpp"

namespace telegrad {

/// The bits of |value|: they order like the magnitudes.
template <class V>
std::uint64_t magnitude_key(V value) {
  using Bits = typename kernels::Format<V>::Bits;
  return static_cast<std::uint64_t>(static_cast<Bits>(std::bit_cast<Bits>(value) & kernels::Format<V>::kMagnitude));
}

/// The entries of one range in two.
template <class V>
struct PartedEntries {
  OwnedSlice<V> taken;
  OwnedSlice<V> rest;
};

/// `taken`: exactly the k entries of the largest magnitudes, those of the lowest indices where some are equal; all if there
/// are no more. `entries` are sparse (CHECKed). V is float, double, bf16 or f16.
template <class V>
PartedEntries<V> take_largest(const SparseView<V>& entries, std::uint64_t k);

}  // namespace telegrad
