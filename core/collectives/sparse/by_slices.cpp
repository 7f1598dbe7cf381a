// Sparse allreduce over owned slices: each rank owns one slice of the index range, comes to the sum of everybody's entries
// there, and sends it to all: encoded once, round a ring, while the slice before is decoded (allgather_slices.hpp), or among few
// ranks between hosts to each without what it gave (exchanged_sums.hpp). For evenly spread entries at most 2(P−1)α + (k + K)(P−1)/P·β with the split. Renggli et al.,
// "SparCML: high-performance sparse communication for machine learning", SC 2019, §5.3.2 (SSAR_Split_allgather) and
// §5.3.3 (DSAR_Split_allgather: owned slices go dense).
#include "collectives/sparse/by_slices.hpp"

#include <limits>
#include <utility>

#include "collectives/sparse/allgather_slices.hpp"
#include "collectives/sparse/balanced_slices.hpp"
#include "collectives/sparse/exchanged_sums.hpp"
#include "collectives/sparse/ring.hpp"
#include "collectives/sparse/split.hpp"

namespace telegrad {
namespace {

template <class V>
Task<Partition> owned_slices(Transport& net, const SparseVector<V>& mine, const SparseReduction& how) {
  if (how.slices == Slices::balanced && net.size() > 1) co_return co_await balanced_slices(net, mine);
  co_return Partition(static_cast<std::size_t>(mine.dimension()), net.size());
}

// Balanced slices stay sparse, each by itself.
SparseReduction of_each_slice(SparseReduction how) {
  if (how.slices == Slices::balanced) how.switch_factor = std::numeric_limits<double>::infinity();
  return how;
}

template <class V, class To>
Task<void> sum_exchanged(Transport& net, SparseVector<V> mine, const Partition& slices, SparseReduction how, To& whole) {
  GivenShares<V> given;
  co_await give_shares(net, mine, slices, how, {}, given);
  co_await exchange_sums(net, std::move(mine), std::move(given), slices, how, split_steps<V>(net, slices), whole);
}

template <class V>
Task<EncodedSlice<V>> reduce_owned(Transport& net, SparseVector<V> mine, Partition slices, SparseReduction how) {
  const Rank size = net.size();
  // Of a mean, an error counts as often as there are ranks that it is the mean of.
  const float weight = how.reduction == Reduction::avg ? static_cast<float>(size) : 1.0F;
  // Between two hosts both send the same, and the ring does it with less work; through memory nothing is encoded to be split.
  const bool ring_is_better = how.algorithm == Algorithm::automatic && size == 2 && !net.shares_memory();
  const bool by_ring = size > 1 && (how.algorithm == Algorithm::ring || ring_is_better);
  OwnedSlice<V> owned;
  if (by_ring) {  // GCC 12 does not understand co_await in a conditional expression
    owned = co_await ring_owned_slice(net, mine, slices, how);
  } else {
    owned = co_await reduce_owned_slice(net, mine, slices, how);
  }
  mine = SparseVector<V>();  // long vectors leave room for the sum
  EncodedSlice<V> result{.slices = std::move(slices)};
  result.first_step = by_ring ? ring_steps<V>(net, result.slices) : split_steps<V>(net, result.slices);
  co_await encode_slice(net, std::move(owned), how, weight, result);
  co_return result;
}

}  // namespace

template <class V, template <class> class Out>
Task<void> allreduce_by_slices(Transport& net, SparseVector<V> mine, const SparseReduction& how, Out<V>& out) {
  Partition slices = co_await owned_slices(net, mine, how);
  if (exchanges_sums<V>(net, slices, how)) {
    typename Out<V>::Slices whole = out.slices(net, how);
    co_await sum_exchanged(net, std::move(mine), slices, of_each_slice(how), whole);
    out.take(whole);
    co_return;
  }
  EncodedSlice<V> owned = co_await reduce_owned(net, std::move(mine), std::move(slices), of_each_slice(how));
  co_await allgather_slices(net, std::move(owned), how, out);
}

#define TELEGRAD_INSTANTIATE(V, Out) \
  template Task<void> allreduce_by_slices(Transport&, SparseVector<V>, const SparseReduction&, Out<V>&);
TELEGRAD_FOR_SPARSE_OUTPUTS(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
