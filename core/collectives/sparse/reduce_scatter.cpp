// Sparse reduce_scatter: the split of sparse/split.hpp, (P−1)α + k(P−1)/P·β with k entries per rank, spread evenly over
// the slices. Renggli et al., "SparCML: high-performance sparse communication for machine learning", SC 2019, §5.3.2 (the
// first half of SSAR_Split_allgather).
#include "collectives/sparse/reduce_scatter.hpp"

#include <utility>

#include "base/check.hpp"
#include "codec/slices.hpp"
#include "collectives/sparse/half_vectors.hpp"
#include "collectives/sparse/split.hpp"

namespace telegrad {

template <class V>
Task<SparseVector<V>> reduce_scatter_sparse(Transport& net, SparseVector<V> mine, Partition slices,
                                            SparseReduction how) {
  TELEGRAD_CHECK(slices.blocks() == net.size() && slices.count() == mine.dimension());
  if constexpr (std::is_same_v<V, f16>) {
    if (is_formed_in_f32<V>(how.reduction)) {
      SparseVector<float> wide;
      co_await widen_vector(net, std::move(mine), wide);
      SparseVector<float> average = co_await reduce_scatter_sparse(net, std::move(wide), std::move(slices), how);
      SparseVector<V> slice;
      co_await narrow_vector(net, std::move(average), slice);
      co_return slice;
    }
  }
  OwnedSlice<V> sum = co_await reduce_owned_slice(net, mine, slices, how);
  SparseVector<V> vector;
  co_await decide(net, bytes_of(sum.view()), [&] {
    vector = sparse_vector(mine.dimension(), std::move(sum), how.reduction);
  });
  co_return vector;
}

#define TELEGRAD_INSTANTIATE(V) \
  template Task<SparseVector<V>> reduce_scatter_sparse(Transport&, SparseVector<V>, Partition, SparseReduction);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
