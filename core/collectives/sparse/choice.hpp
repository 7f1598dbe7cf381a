#pragma once
// Which algorithm sums sparse vectors, if the caller names none: costs, and what earlier sums of the communicator had in
// common. How ranks come to agree, this must not know.

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "base/types.hpp"
#include "collectives/dense/choice.hpp"
#include "collectives/sparse/cost.hpp"
#include "collectives/sparse/observation.hpp"
#include "collectives/support/nodes.hpp"

namespace telegrad {

/// What to do with a sum that goes by recursive doubling as yet; of two ranks' verdicts the greater one counts. dense, filled:
/// sum vectors, as dense vectors are summed or by allreduce_filled(). split: by slices, on two levels where nodes are known;
/// flat_split: where they are, by slices of all ranks nevertheless.
enum class SparseVerdict : std::uint8_t { go_on = 0, dense = 1, filled = 2, flat_split = 3, split = 4 };

/// One for each communicator. Any thread may use it.
class SparseChoice {
 public:
  /// `dense`: chooses among dense algorithms. `costs`: of the network, as it was measured, if it was. `fills`: whether
  /// allreduce_filled() is among what is chosen from. The same on all ranks. `first`: what is expected of sums before any of
  /// their kind was seen. `nodes`: costs of nodes, if they were measured.
  explicit SparseChoice(AllreduceTable dense, std::optional<NetworkCosts> costs = {}, bool fills = true,
                        const Overlaps& first = {}, std::optional<NodeCosts> nodes = {})
      : dense_(std::move(dense)), costs_(costs), node_costs_(nodes), fills_(fills), first_(first) {}

  const AllreduceTable& dense() const { return dense_; }
  bool fills() const { return fills_; }
  /// Whether dense vectors of so many elements are summed on two levels: so are vectors of which nothing else tells.
  bool on_two_levels(std::uint64_t dimension, DType dtype) const {
    return dense_.choose(static_cast<std::size_t>(dimension) * size_of(dtype)) == Algorithm::two_level;
  }
  const std::optional<NetworkCosts>& costs() const { return costs_; }
  const std::optional<NodeCosts>& node_costs() const { return node_costs_; }

  /// Sums that are taken to be alike.
  struct Kind {
    std::uint64_t dimension;
    DType dtype;
    Reduction reduction;
    friend auto operator<=>(const Kind&, const Kind&) = default;
  };
  /// For the next sum of that kind, in the order of calls.
  std::shared_ptr<SumObservation> observation(const Kind& kind);

 private:
  const AllreduceTable dense_;
  const std::optional<NetworkCosts> costs_;
  const std::optional<NodeCosts> node_costs_;
  const bool fills_;
  const Overlaps first_;
  std::mutex mutex_;
  std::map<Kind, ObservedSums> observed_;  // mutex_
};

/// The choice for one sum.
class SparseDecision {
 public:
  /// `overlap`: expected of the vectors. `nodes`: where the sum may go on two levels, otherwise null. Outlives it.
  SparseDecision(const SparseChoice& choice, const SparseSumShape& shape, double overlap, bool shares_memory,
                 const Nodes* nodes = nullptr);

  /// Of one rank that knows its own entries, and whether it holds them densely. Others may decide otherwise.
  SparseVerdict alone(double entries, bool is_dense) const;
  /// After `round` rounds (at least one), whose last one made sums of `full` entries out of two that had `half` on average:
  /// the same on all ranks that know these: by nothing else that only this rank knows.
  SparseVerdict after(unsigned round, double half, double full) const;

  /// Whether any rank's verdict may be that sums are filled; the same on all.
  bool may_fill() const { return SparseCosts(own_shape_, costs_).sums_filled(); }
  /// The same of flat_split.
  bool knows_levels() const { return nodes_ != nullptr; }

  /// Of vectors: two_level only where nodes are known.
  Algorithm dense_algorithm() const { return dense_algorithm_; }

 private:
  SparseVerdict cheapest(const SparseSumShape& shape, const SumGrowth& members, unsigned round, double entries,
                         bool is_dense) const;

  SparseSumShape own_shape_;
  SparseSumShape common_shape_;  // ranks may wish for different formats and places of the sum
  NetworkCosts costs_;
  Algorithm dense_algorithm_;
  double overlap_;
  const Nodes* nodes_;
  NodeCosts node_costs_;
};

}  // namespace telegrad
