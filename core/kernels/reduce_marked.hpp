#pragma once
// Element-wise reductions of ranges that are held as marks and values (marks.hpp) or densely, to a dense one: nobody makes a dense
// range of each. V is float, double, bf16 or f16.

#include <cstdint>
#include <span>

#include "base/types.hpp"

namespace telegrad::kernels {

/// The values of a range: those of the marked elements in ascending order, or, where there are no marks, of all elements.
template <class V>
struct MarkedValues {
  std::span<const std::uint64_t> marks;
  std::span<const V> values;
};

/// out[i] = the reduction of the inputs' i-th elements in the inputs' order, the sum for an average; absent_element(reduction) where
/// nobody has one. A NaN is canonical. There are two inputs or more, each with mark_words(out.size()) words of marks and as many values
/// as are marked, or without marks with out.size() values (all CHECKed). `out` may be the values of the first one where that has no
/// marks, and overlaps none otherwise.
template <class V>
void reduce_marked(Reduction reduction, std::span<const MarkedValues<V>> inputs, std::span<V> out);

namespace reference {
template <class V>
void reduce_marked(Reduction reduction, std::span<const MarkedValues<V>> inputs, std::span<V> out);
}  // namespace reference

}  // namespace telegrad::kernels
