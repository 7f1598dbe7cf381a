#pragma once
// Averages of f16 vectors are formed in f32: the average of finite values lies in f16's range, the sum on the way to it
// need not. Messages hold f32 values then, as in all sums of f32.

#include <type_traits>

#include "base/types.hpp"
#include "codec/sparse_vector.hpp"
#include "transport/transport.hpp"

namespace telegrad {

template <class V>
constexpr bool is_formed_in_f32(Reduction reduction) {
  return std::is_same_v<V, f16> && reduction == Reduction::avg;
}

/// The same entries in f32.
Task<void> widen_vector(Transport& net, SparseVector<f16> from, SparseVector<float>& into);
/// And back, each rounded once, to nearest even.
Task<void> narrow_vector(Transport& net, SparseVector<float> from, SparseVector<f16>& into);

}  // namespace telegrad
