#include "collectives/sparse/choice.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <optional>

#include "collectives/sparse/cost.hpp"

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
Algorithm dense_algorithm_of(const SparseChoice& choice, const SparseSumShape& shape, const Nodes* nodes) {
  if (!choice.costs() || !choice.dense().choices().empty()) {
    const std::size_t bytes = static_cast<std::size_t>(shape.dimension) * size_of(shape.dtype);
    return nodes != nullptr ? choice.dense().choose(bytes) : choice.dense().choose_flat(bytes);
  }
  const auto fastest_flat = [](const auto& costs) {
    return *std::ranges::min_element(kAllreduceAlgorithms, {}, [&](Algorithm one) { return costs.dense_s(one); });
  };
  if (nodes == nullptr) return fastest_flat(SparseCosts(shape, *choice.costs()));
  const SparseLevelCosts costs(shape, *nodes, *choice.costs(), choice.node_costs().value_or(NodeCosts{}));
  const Algorithm flat = fastest_flat(costs);
  return costs.dense_s(Algorithm::two_level) < costs.dense_s(flat) ? Algorithm::two_level : flat;
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
      dense_algorithm_(dense_algorithm_of(choice, shape, nodes)),
      overlap_(overlap),
      nodes_(nodes),
      node_costs_(choice.node_costs().value_or(NodeCosts{})) {}

SparseVerdict SparseDecision::cheapest(const SparseSumShape& shape, const SumGrowth& members, unsigned round,
                                       double entries, bool is_dense) const {
  const SparseCosts costs(shape, costs_);
  const double sum_entries = members.entries_doubled(costs.rounds());
  const double folds = std::has_single_bit(shape.ranks) ? 0.0 : 2.0;
  std::optional<SparseLevelCosts> levels;
  if (nodes_ != nullptr) levels.emplace(shape, *nodes_, costs_, node_costs_);
  const double rounds_s = levels ? levels->empty_rounds_s(round) : (costs.rounds() - round) * costs_.alpha_s;
  const double heard_s = rounds_s + folds * costs_.alpha_s;  // by all, that all want it
  double doubling_s = levels ? levels->doubling_s(members, round) : costs.doubling_s(members, round);
  double flat_s = levels ? levels->flat_s(entries, sum_entries) + heard_s : costs.split_s(entries, sum_entries);
  double split_s = levels ? levels->two_level_s(entries, members, sum_entries) : flat_s;
  double filled_s = levels ? levels->filled_s(entries) : costs.filled_s(entries);
  double vectors_s = levels ? levels->dense_s(dense_algorithm_) : costs.dense_s(dense_algorithm_);
  // Entries that are read where they lie are added to what comes round a ring: no vector is made of them.
  const double copied_s = is_dense ? 0.0 : costs.copied_s(entries);
  const bool added_beside = copied_s > 0.0 && !shape.shares_memory && dense_algorithm_ == Algorithm::ring;
  if (!is_dense && !added_beside) vectors_s += costs.made_dense_s();
  for (double* const sparse_s : {&doubling_s, &flat_s, &split_s}) *sparse_s += copied_s + costs.written_s(sum_entries);
  if (!shape.shares_memory) filled_s *= 1.0 + kWaitPerSender * (shape.ranks - 1.0);
  // Where all hold vectors, nobody has marks to make; in memory what has filled in always goes so.
  const bool filled = costs.sums_filled() && !is_dense && (shape.shares_memory || filled_s <= vectors_s);
  const double dense_s = (filled ? filled_s : vectors_s) + heard_s;
  const double best_s = std::min({doubling_s, flat_s, split_s, dense_s});
  if (doubling_s == best_s) return SparseVerdict::go_on;
  if (split_s == best_s) return SparseVerdict::split;
  if (flat_s == best_s) return SparseVerdict::flat_split;
  return filled ? SparseVerdict::filled : SparseVerdict::dense;
}

SparseVerdict SparseDecision::alone(double entries, bool is_dense) const {
  const SparseCosts costs(own_shape_, costs_);
  const double ranks_a_member = own_shape_.ranks / costs.members();
  const SumGrowth members = SumGrowth(own_shape_.dimension, entries, overlap_).of_sums(ranks_a_member);
  const SparseVerdict verdict = cheapest(own_shape_, members, 0, entries, is_dense);
  if (verdict != SparseVerdict::go_on) return verdict;
  // After the first round all decide by usual formats: what they would give up then is not begun.
  return cheapest(common_shape_, members, std::min(1U, costs.rounds()), entries, is_dense);
}

SparseVerdict SparseDecision::after(unsigned round, double half, double full) const {
  const SparseCosts costs(common_shape_, costs_);
  const SumGrowth members = SumGrowth::seen(common_shape_.dimension, half, full, round);
  const double entries = members.entries_doubled(0) * costs.members() / common_shape_.ranks;
  return cheapest(common_shape_, members, round, entries, false);
}

}  // namespace telegrad
