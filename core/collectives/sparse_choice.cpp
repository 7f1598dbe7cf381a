#include "collectives/sparse_choice.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>

namespace telegrad {
namespace {

constexpr std::size_t kKindsMost = 4096;  // beyond: begun anew, so that a program with ever new lengths needs no memory

// How much longer filled sums take for every rank that sends to the same port: 1.02, 1.1 and 1.25 times what their bytes
// take among 2, 4 and 8 ranks at 1 Gbit/s, where a dense sum's links keep moving.
constexpr double kWaitPerSender = 0.04;

SparseSumShape with_usual_formats(SparseSumShape shape, bool shares_memory) {
  shape.indices = shares_memory ? IndexFormat::none : IndexFormat::packed;
  shape.packs_values = !shares_memory;
  shape.into_dense = false;
  return shape;
}

// By the table; where costs are known but no table comes with them, by these.
Algorithm dense_algorithm_of(const SparseChoice& choice, const SparseSumShape& shape) {
  if (!choice.costs() || !choice.dense().choices().empty()) {
    return choice.dense().choose_flat(static_cast<std::size_t>(shape.dimension) * size_of(shape.dtype));
  }
  const SparseCosts costs(shape, *choice.costs());
  return *std::ranges::min_element(kAllreduceAlgorithms, {}, [&](Algorithm one) { return costs.dense_s(one, std::nullopt); });
}

}  // namespace

std::shared_ptr<SumObservation> SparseChoice::observation(const Kind& kind) {
  const std::scoped_lock lock(mutex_);
  if (observed_.size() >= kKindsMost && !observed_.contains(kind)) observed_.clear();
  return observed_.try_emplace(kind, first_).first->second.next();
}

SparseDecision::SparseDecision(const SparseChoice& choice, const SparseSumShape& shape, double overlap,
                               bool shares_memory, const Nodes* nodes)
    : own_shape_(shape),
      common_shape_(with_usual_formats(shape, shares_memory)),
      costs_(choice.costs().value_or(costs_unmeasured(shares_memory))),
      dense_algorithm_(dense_algorithm_of(choice, shape)),
      overlap_(overlap),
      nodes_(nodes) {}

// Of a slice between nodes, whose ranks have been summed inside; and for the messages inside, of which little is known,
// as much latency as between nodes.
double SparseDecision::two_level_s(const SumGrowth& members, double sum_entries) const {
  const double slices = nodes_->slices();
  SparseSumShape between = common_shape_;
  between.ranks = nodes_->count();
  between.dimension = (between.dimension + nodes_->slices() - 1) / nodes_->slices();
  const Rank together = (nodes_->ranks() + nodes_->count() - 1) / nodes_->count();
  const auto doublings = static_cast<unsigned>(std::bit_width(together)) - 1;
  const double entries = members.entries_doubled(doublings);
  return SparseCosts(between, costs_).split_s(entries / slices, sum_entries / slices) + 2.0 * doublings * costs_.alpha_s;
}

SparseVerdict SparseDecision::cheapest(const SparseCosts& costs, const SumGrowth& members, unsigned round, double entries,
                                       bool is_dense) const {
  const double sum_entries = members.entries_doubled(costs.rounds());
  const double folds = std::has_single_bit(common_shape_.ranks) ? 0.0 : 2.0;
  const double left = costs.rounds() - round + folds;
  const double written_s = costs.written_s(sum_entries);
  const double doubling_s = costs.doubling_s(members, round) + written_s;
  if (nodes_ != nullptr) return doubling_s <= two_level_s(members, sum_entries) + written_s ? SparseVerdict::go_on : SparseVerdict::split;
  const double split_s = costs.split_s(entries, sum_entries) + written_s;
  const double vectors_s = costs.dense_s(dense_algorithm_, is_dense ? std::nullopt : std::optional(entries));
  const double waiting = own_shape_.shares_memory ? 1.0 : 1.0 + kWaitPerSender * (own_shape_.ranks - 1.0);
  const double filled_s = waiting * costs.filled_s(entries);
  // Where all hold vectors, nobody has marks to make; in memory what has filled in always goes so.
  const bool filled = costs.sums_filled() && !is_dense && (own_shape_.shares_memory || filled_s <= vectors_s);
  const double summed_s = filled ? filled_s : vectors_s;
  const double dense_s = summed_s + left * costs_.alpha_s;  // all must hear that all want it
  if (doubling_s <= std::min(split_s, dense_s)) return SparseVerdict::go_on;
  if (split_s <= dense_s) return SparseVerdict::split;
  return filled ? SparseVerdict::filled : SparseVerdict::dense;
}

SparseVerdict SparseDecision::alone(double entries, bool is_dense) const {
  const SparseCosts costs(own_shape_, costs_);
  const double ranks_a_member = own_shape_.ranks / costs.members();
  const SumGrowth members = SumGrowth(own_shape_.dimension, entries, overlap_).of_sums(ranks_a_member);
  const SparseVerdict verdict = cheapest(costs, members, 0, entries, is_dense);
  if (verdict != SparseVerdict::go_on) return verdict;
  // After the first round all decide by usual formats: what they would give up then is not begun.
  return cheapest(SparseCosts(common_shape_, costs_), members, std::min(1U, costs.rounds()), entries, is_dense);
}

SparseVerdict SparseDecision::after(unsigned round, double half, double full) const {
  const SparseCosts costs(common_shape_, costs_);
  const SumGrowth members = SumGrowth::seen(common_shape_.dimension, half, full, round);
  const double entries = members.entries_doubled(0) * costs.members() / common_shape_.ranks;
  return cheapest(costs, members, round, entries, false);
}

}  // namespace telegrad
