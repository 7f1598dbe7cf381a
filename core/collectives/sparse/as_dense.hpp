#pragma once

#include "base/types.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/sparse/output.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// How dense vectors are summed: by allreduce_filled(), or by a dense algorithm; two_level only with nodes.
struct DenseSum {
  bool filled = false;
  Algorithm algorithm = Algorithm::ring;
};

/// The reduction of all ranks' vectors as dense vectors, the same bits on every rank. Borrowed entries are read, and checked,
/// where they lie. Every rank has called when it begins: an output may be written at once. Out: SparseOutput or DenseOutput.
template <class V, template <class> class Out>
Task<void> allreduce_as_dense(Transport& net, SparseVector<V> mine, const SparseReduction& how, DenseSum by, Out<V>& out);

/// Whether a vector holds entries that nobody has checked.
template <class V>
bool borrows_entries(const SparseVector<V>& vector) {
  if constexpr (std::is_same_v<V, CountedF32>) {
    return false;
  } else {
    return vector.is_borrowed() && !vector.is_dense();
  }
}

}  // namespace telegrad
