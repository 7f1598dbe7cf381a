#pragma once
// A sorted run of entries as two arrays, read-only or to be written. Does not own them.

#include <cstddef>
#include <cstdint>
#include <span>

// The values that entries may have: instantiates a source's templates for each. Top-k sums and staged entries take floats
// alone. Unsigned integers are held as signed ones of their width, see SparseReduction::is_unsigned.
#define TELEGRAD_FOR_FLOAT_VALUES(instantiate) instantiate(float) instantiate(double) instantiate(bf16) instantiate(f16)
#define TELEGRAD_FOR_ENTRY_VALUES(instantiate) \
  TELEGRAD_FOR_FLOAT_VALUES(instantiate) instantiate(std::int32_t) instantiate(std::int64_t)

namespace telegrad::kernels {

/// Strictly increasing indices, one value each.
template <class V>
struct Entries {
  std::span<const std::uint32_t> indices;
  std::span<const V> values;

  std::size_t size() const { return indices.size(); }
  bool empty() const { return indices.empty(); }
  Entries subrun(std::size_t first, std::size_t count) const {
    return {indices.subspan(first, count), values.subspan(first, count)};
  }
};

/// Where entries go; both spans have one length, the capacity.
template <class V>
struct EntriesOut {
  std::span<std::uint32_t> indices;
  std::span<V> values;

  std::size_t capacity() const { return indices.size(); }
};

}  // namespace telegrad::kernels
