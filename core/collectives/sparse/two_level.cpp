// Two-level sparse allreduce: a sparse reduce-scatter inside every node (sparse/split.hpp), a sparse allreduce of each slice
// among its owners, one in each node, and an allgather of the slices inside (allgather_slices.hpp). What ranks of a node have
// in common crosses the network once. Renggli et al., "SparCML", SC 2019, §5.3, for the parts.
#include "collectives/sparse/two_level.hpp"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "collectives/sparse/allgather_slices.hpp"
#include "collectives/sparse/auto.hpp"
#include "collectives/sparse/split.hpp"
#include "transport/group_transport.hpp"

namespace telegrad {
namespace {

constexpr Step kPhaseSteps = Step{1} << 30;

void move_indices(std::span<std::uint32_t> indices, std::uint32_t by) {
  for (std::uint32_t& index : indices) index += by;  // modulo 2^32: also to the left
}

// Indices are counted from the slice's begin in a sum of owners, so that they share its range evenly.
template <class V>
SparseVector<V> vector_of(OwnedSlice<V>& slice) {
  if constexpr (std::is_same_v<V, CountedF32>) {
    const std::uint64_t size = slice.range.size();
    return slice.dense ? SparseVector<V>::dense(size) : SparseVector<V>::sparse(size, slice.entries);
  } else {
    if (slice.dense) return SparseVector<V>::adopt_dense(std::move(slice.values));
    move_indices(slice.indices.span(), 0U - static_cast<std::uint32_t>(slice.range.begin));
    return SparseVector<V>::adopt_sparse(slice.range.size(), std::move(slice.indices), std::move(slice.values));
  }
}

template <class V>
void take_vector(OwnedSlice<V>& slice, SparseVector<V> sum) {
  slice.dense = sum.is_dense();
  if constexpr (std::is_same_v<V, CountedF32>) {
    slice.entries = sum.entries();
  } else {
    slice.indices = sum.take_indices();
    slice.values = sum.take_values();
    if (!slice.dense) move_indices(slice.indices.span(), static_cast<std::uint32_t>(slice.range.begin));
  }
}

template <class V>
class TwoLevelSum {
 public:
  TwoLevelSum(Transport& net, const SparseReduction& how)
      : net_(net),
        nodes_(*how.nodes),
        how_(how),
        node_(nodes_.node_of(net.rank())),
        place_(nodes_.place_of(net.rank())) {}

  GroupTransport inside(Step phase) const {
    return {net_, nodes_.members(node_), place_, nodes_.inside_shares_memory(), phase * kPhaseSteps, kPhaseSteps};
  }

  // This rank's slice of the sum as it is to be gathered inside.
  Task<void> reduce(SparseVector<V> mine, EncodedSlice<V>& result) {
    OwnedSlice<V> slice;
    {
      GroupTransport group = inside(0);
      const SparseReduction summing = how_inside(how_.reduction == Reduction::avg ? Reduction::sum : how_.reduction);
      slice = co_await reduce_owned_slice(group, mine, result.slices, summing);
    }
    mine = SparseVector<V>();
    if (rounds_means()) co_await divide_by_ranks(net_, slice);
    if (place_ < nodes_.slices()) co_await sum_between(slice);
    if (how_.reduction == Reduction::avg && !rounds_means()) co_await divide_by_ranks(net_, slice);

    const SparseReduction gathering = how_inside(how_.reduction);
    GroupTransport group = inside(1);  // in which it is gathered: that tells how it goes
    co_await encode_slice(group, std::move(slice), gathering, 1.0F, result);
  }

  EncodedSlice<V> slices_of(std::uint64_t dimension) const {
    const auto lengths = nodes_.lengths(node_, static_cast<std::size_t>(dimension));
    return {.slices = Partition(std::span<const std::uint64_t>(lengths))};
  }

 private:
  // What is rounded between nodes is a mean already: sums might be too large for it.
  bool rounds_means() const {
    return how_.reduction == Reduction::avg && how_.wire.values != ValueEncoding::native;
  }

  // Memory is faster than packing, and rounding would gain nothing. Owners of one slice hand it on alike, so that all ranks
  // hold the sum in the same form: what goes dense was decided between nodes.
  SparseReduction how_inside(Reduction reduction) const {
    SparseReduction how = how_;
    how.algorithm = Algorithm::two_level;
    how.reduction = reduction;
    how.residual = {};
    how.wire.values = ValueEncoding::native;
    if (nodes_.inside_shares_memory()) {
      how.wire.indices = IndexFormat::none;
      how.wire.packs_values = false;
    }
    return how;
  }

  Task<void> sum_between(OwnedSlice<V>& slice) {
    GroupTransport group(net_, nodes_.owners(place_), node_, false, 0, std::numeric_limits<Step>::max());
    SparseReduction summing = how_;
    summing.algorithm = Algorithm::automatic;
    summing.nodes = nullptr;
    summing.sums_of_nodes = true;
    if (how_.reduction == Reduction::avg) summing.reduction = Reduction::sum;
    const IndexRange range = slice.range;
    const std::span<float> residual =
        how_.residual.empty() ? how_.residual : how_.residual.subspan(range.begin, range.size());
    Array<float> lost;  // of a mean, which counts as often as there are ranks
    summing.residual = residual;
    if (rounds_means() && !residual.empty()) {
      lost = Array<float>(residual.size());
      std::ranges::fill(lost, 0.0F);
      summing.residual = lost.span();
    }
    SparseVector<V> vector = vector_of(slice);
    vector = co_await allreduce_sparse(group, std::move(vector), summing);
    co_await decide(net_, lost.size() * sizeof(float), [&] {
      for (std::size_t i = 0; i < lost.size(); ++i) residual[i] += static_cast<float>(net_.size()) * lost[i];
    });
    take_vector(slice, std::move(vector));
  }

  Transport& net_;
  const Nodes& nodes_;
  const SparseReduction& how_;
  const Rank node_;
  const Rank place_;
};

}  // namespace

template <class V, template <class> class Out>
Task<void> allreduce_sparse_two_level(Transport& net, SparseVector<V> mine, const SparseReduction& how, Out<V>& out) {
  TELEGRAD_CHECK(how.nodes != nullptr && how.nodes->ranks() == net.size() && how.nodes->two_level() &&
                 how.slices == Slices::equal);
  TwoLevelSum<V> sum(net, how);
  EncodedSlice<V> slice = sum.slices_of(mine.dimension());
  co_await sum.reduce(std::move(mine), slice);
  GroupTransport group = sum.inside(1);
  co_await allgather_slices(group, std::move(slice), how, out);
}

#define TELEGRAD_INSTANTIATE(V, Out) \
  template Task<void> allreduce_sparse_two_level(Transport&, SparseVector<V>, const SparseReduction&, Out<V>&);
TELEGRAD_FOR_SPARSE_OUTPUTS(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
