// Sparse allreduce over owned slices: each rank owns one slice of the index range, comes to the sum of everybody's entries
// there, and sends it to all: encoded once, round a ring, while the slice before is decoded (allgather_slices.hpp), or among few
// ranks between hosts to each without what it gave (exchanged_sums.hpp). For evenly spread entries at most 2(P−1)α + (k + K)(P−1)/P·β with the split. Renggli et al.,
// "SparCML: high-performance sparse communication for machine learning", SC 2019, §5.3.2 (SSAR_Split_allgather) and
// §5.3.3 (DSAR_Split_allgather: owned slices go dense).
#include "collectives/sparse/auto.hpp"

#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "collectives/sparse/allgather_slices.hpp"
#include "collectives/sparse/balanced_slices.hpp"
#include "collectives/sparse/doubling.hpp"
#include "collectives/sparse/exchanged_sums.hpp"
#include "collectives/sparse/half_vectors.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/sparse/open.hpp"
#include "collectives/sparse/placed_sums.hpp"
#include "collectives/sparse/ring.hpp"
#include "collectives/sparse/split.hpp"
#include "collectives/sparse/two_level.hpp"

namespace telegrad {
namespace {

template <class V>
Task<Partition> owned_slices(Transport& net, const SparseStream<V>& mine, const SparseReduction& how) {
  if (how.slices == Slices::balanced && net.size() > 1) co_return co_await balanced_slices(net, mine);
  co_return Partition(static_cast<std::size_t>(mine.dimension()), net.size());
}

// Balanced slices stay sparse, each by itself.
SparseReduction of_each_slice(SparseReduction how) {
  if (how.slices == Slices::balanced) how.switch_factor = std::numeric_limits<double>::infinity();
  return how;
}

template <class V, class To>
Task<void> sum_exchanged(Transport& net, SparseStream<V> mine, const Partition& slices, SparseReduction how, To& whole) {
  GivenShares<V> given;
  co_await give_shares(net, mine, slices, how, {}, given);
  co_await exchange_sums(net, std::move(mine), std::move(given), slices, how, split_steps<V>(net, slices), whole);
}

template <class V>
Task<EncodedSlice<V>> reduce_owned(Transport& net, SparseStream<V> mine, Partition slices, SparseReduction how) {
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
  mine = SparseStream<V>();  // long streams leave room for the sum
  EncodedSlice<V> result{.slices = std::move(slices)};
  result.first_step = by_ring ? ring_steps<V>(net, result.slices) : split_steps<V>(net, result.slices);
  co_await encode_slice(net, std::move(owned), how, weight, result);
  co_return result;
}

template <class V>
Task<void> sum_by_slices(Transport& net, SparseStream<V> mine, const SparseReduction& how, SparseStream<V>& sum) {
  Partition slices = co_await owned_slices(net, mine, how);
  if (exchanges_sums<V>(net, slices, how)) {
    AssembledSum<V> whole(net, how);
    co_await sum_exchanged(net, std::move(mine), slices, of_each_slice(how), whole);
    sum = whole.finish();
    co_return;
  }
  EncodedSlice<V> owned = co_await reduce_owned(net, std::move(mine), std::move(slices), of_each_slice(how));
  sum = co_await allgather_slices<V>(net, std::move(owned), how);
}

// `entries`: becomes about how many the sum has.
template <class V>
Task<void> sum_by_slices_into(Transport& net, SparseStream<V> mine, const SparseReduction& how, std::span<V> output,
                              double& entries) {
  Partition slices = co_await owned_slices(net, mine, how);
  if (exchanges_sums<V>(net, slices, how)) {
    WrittenSum<V> whole(net, how, output, entries);
    co_await sum_exchanged(net, std::move(mine), slices, of_each_slice(how), whole);
    co_return;
  }
  EncodedSlice<V> owned = co_await reduce_owned(net, std::move(mine), std::move(slices), of_each_slice(how));
  co_await allgather_slices_into(net, std::move(owned), how, output, entries);
}

// Of many entries.
template <class V>
Task<void> sum_many(Transport& net, SparseStream<V> mine, const SparseReduction& how, SparseStream<V>& sum) {
  if (!knows_levels(how)) {
    co_await sum_by_slices(net, std::move(mine), how, sum);
    co_return;
  }
  sum = co_await allreduce_sparse_two_level(net, std::move(mine), how);
}

template <class V>
Task<void> sum_many_into(Transport& net, SparseStream<V> mine, const SparseReduction& how, std::span<V> output,
                         double& entries) {
  if (!knows_levels(how)) {
    co_await sum_by_slices_into(net, std::move(mine), how, output, entries);
    co_return;
  }
  co_await allreduce_sparse_two_level_into(net, std::move(mine), how, output, entries);
}

template <class V>
Task<OwnedSlice<V>> sum_by_doubling(Transport& net, const SparseStream<V>& mine, const SparseReduction& how) {
  SparseDoubling<V> doubling(net, mine, how, 0, nullptr);
  co_await doubling.run();
  co_return doubling.take_sum();
}

template <class V>
Task<SparseStream<V>> stream_of(Transport& net, OwnedSlice<V> sum, const SparseReduction& how) {
  const double delta = memory_delta<V>(sum.range.end, how.switch_factor);
  const std::size_t bytes = bytes_of(sum.view());
  SparseStream<V> stream;
  co_await decide(net, bytes, [&] { stream = whole_stream(std::move(sum), how.reduction, delta); });
  co_return stream;
}

}  // namespace

template <class V>
Task<SparseStream<V>> allreduce_sparse(Transport& net, SparseStream<V> mine, SparseReduction how) {
  SparseStream<V> sum;
  if constexpr (std::is_same_v<V, f16>) {
    if (is_formed_in_f32<V>(how.reduction)) {
      SparseStream<float> wide;
      co_await widen_stream(net, std::move(mine), wide);
      SparseStream<float> average = co_await allreduce_sparse(net, std::move(wide), how);
      co_await narrow_stream(net, std::move(average), sum);
      co_return sum;
    }
  }
  if (how.algorithm == Algorithm::two_level) co_return co_await allreduce_sparse_two_level(net, std::move(mine), how);
  if (how.algorithm == Algorithm::recursive_doubling) {
    co_return co_await stream_of<V>(net, co_await sum_by_doubling(net, mine, how), how);
  }
  if (!is_open(net, how)) {
    co_await sum_many(net, std::move(mine), how, sum);
    co_return sum;
  }
  OpenSum<V> open(net, std::move(mine), how, false);
  const SparseVerdict verdict = co_await open.begin();
  if (verdict == SparseVerdict::go_on) co_return co_await stream_of<V>(net, open.take_sum(), how);
  if (verdict == SparseVerdict::dense || verdict == SparseVerdict::filled) co_return co_await open.sum_densely();
  if (verdict == SparseVerdict::flat_split) {
    co_await sum_by_slices(net, open.take_mine(), how, sum);
  } else {
    std::vector<Task<void>> both;
    both.push_back(open.doubling().hear_others());
    both.push_back(sum_many(net, open.take_mine(), how, sum));
    co_await when_all(std::move(both));
  }
  open.saw(entries_in(sum.view(), how.reduction));
  co_return sum;
}

template <class V>
Task<void> allreduce_sparse_into(Transport& net, SparseStream<V> mine, SparseReduction how, std::span<V> output) {
  TELEGRAD_CHECK(output.size() == mine.dimension());
  double entries = 0.0;
  if (is_formed_in_f32<V>(how.reduction)) {
    const SparseStream<V> average = co_await allreduce_sparse(net, std::move(mine), how);
    const StreamView<V> whole = average.view();
    co_await write_view(net, whole, output, how.reduction);
    co_return;
  }
  if (how.algorithm == Algorithm::two_level) {
    co_await allreduce_sparse_two_level_into(net, std::move(mine), how, output, entries);
    co_return;
  }
  OwnedSlice<V> sum;
  if (is_open(net, how)) {
    OpenSum<V> open(net, std::move(mine), how, true);
    const SparseVerdict verdict = co_await open.begin();
    if (verdict == SparseVerdict::dense || verdict == SparseVerdict::filled) co_await open.sum_densely_into(output);
    if (verdict == SparseVerdict::flat_split) {
      co_await sum_by_slices_into(net, open.take_mine(), how, output, entries);
      open.saw(entries);
    }
    if (verdict == SparseVerdict::split) {
      std::vector<Task<void>> both;
      both.push_back(open.doubling().hear_others());
      both.push_back(sum_many_into(net, open.take_mine(), how, output, entries));
      co_await when_all(std::move(both));
      open.saw(entries);
    }
    if (verdict != SparseVerdict::go_on) co_return;
    sum = open.take_sum();
  } else if (how.algorithm == Algorithm::recursive_doubling) {
    sum = co_await sum_by_doubling(net, mine, how);
  } else {
    co_await sum_many_into(net, std::move(mine), how, output, entries);
    co_return;
  }
  const StreamView<V> view = sum.view();
  co_await write_view(net, view, output, how.reduction);
}

#define TELEGRAD_INSTANTIATE(V)                                                                    \
  template Task<SparseStream<V>> allreduce_sparse(Transport&, SparseStream<V>, SparseReduction); \
  template Task<void> allreduce_sparse_into(Transport&, SparseStream<V>, SparseReduction, std::span<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE
template Task<SparseStream<CountedF32>> allreduce_sparse(Transport&, SparseStream<CountedF32>, SparseReduction);

}  // namespace telegrad
