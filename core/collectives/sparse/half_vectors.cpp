#include "collectives/sparse/half_vectors.hpp"

#include <utility>

#include "base/buffer.hpp"
#include "collectives/support/elements.hpp"

namespace telegrad {
namespace {

template <class V>
void adopt(bool dense, std::uint64_t dimension, Array<std::uint32_t> indices, Array<V> values, SparseVector<V>& into) {
  into = dense ? SparseVector<V>::adopt_dense(std::move(values))
               : SparseVector<V>::adopt_sparse(dimension, std::move(indices), std::move(values));
}

}  // namespace

Task<void> widen_vector(Transport& net, SparseVector<f16> from, SparseVector<float>& into) {
  Array<float> values(from.nnz());
  const Partial halves{std::as_bytes(from.values())};
  co_await widen(net, DType::f16, Reduction::none, halves, std::as_writable_bytes(values.span()));
  adopt(from.is_dense(), from.dimension(), from.take_indices(), std::move(values), into);
}

Task<void> narrow_vector(Transport& net, SparseVector<float> from, SparseVector<f16>& into) {
  Array<f16> values(from.nnz());
  const Bytes wide = std::as_writable_bytes(from.own_values());
  co_await narrow(net, DType::f16, Reduction::none, wide, std::as_writable_bytes(values.span()), 0);
  adopt(from.is_dense(), from.dimension(), from.take_indices(), std::move(values), into);
}

}  // namespace telegrad
