#include "collectives/sparse/auto.hpp"

#include <algorithm>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "collectives/sparse/as_dense.hpp"
#include "collectives/sparse/by_slices.hpp"
#include "collectives/sparse/choice.hpp"
#include "collectives/sparse/cost.hpp"
#include "collectives/sparse/doubling.hpp"
#include "collectives/sparse/half_vectors.hpp"
#include "collectives/sparse/output.hpp"
#include "collectives/sparse/two_level.hpp"
#include "collectives/support/elements.hpp"

namespace telegrad {
namespace {

constexpr Step kOpenSteps = Step{1} << 31;
constexpr Step kOpenAboveLevels = Step{3} << 30;  // what goes on two levels is open once more, between nodes

bool has_levels(const SparseReduction& how) { return how.nodes != nullptr && how.nodes->two_level(); }

// Rounding formats cannot be doubled: both partners would round what they hold in common.
bool is_open(const Transport& net, const SparseReduction& how) {
  return how.algorithm == Algorithm::automatic && net.size() > 1 && how.wire.values == ValueEncoding::native;
}

// Whether it may go on two levels; what leaves no choice does.
bool knows_levels(const SparseReduction& how) { return how.algorithm == Algorithm::automatic && how.nodes != nullptr; }

template <class V>
bool leaves_choice(const SparseReduction& how) {
  const bool is_open =
      how.algorithm == Algorithm::automatic || (how.algorithm == Algorithm::two_level && !has_levels(how));
  return is_open && how.wire.values == ValueEncoding::native && !is_formed_in_f32<V>(how.reduction);
}

double expected_overlap(const SparseReduction& how) {
  if (how.observation == nullptr) return 0.0;
  return how.sums_of_nodes ? how.observation->expected().nodes : how.observation->expected().ranks;
}

// Whether a sum that names no algorithm may go on two levels: where ranks come to a choice by costs, as these tell.
template <class V>
bool may_take_levels(const SparseReduction& how, std::uint64_t dimension) {
  if (how.algorithm != Algorithm::automatic || how.slices != Slices::equal || !how.choice) return false;
  const bool compares = how.choice->node_costs().has_value() && how.wire.values == ValueEncoding::native;
  return compares || how.choice->on_two_levels(dimension, dtype_of<V>);
}

// Whether what has filled in is summed as it is held, and not made dense before it is known how: on two levels, mostly.
template <class V>
bool may_fill(std::uint64_t dimension, const SparseReduction& how) {
  if (how.choice == nullptr || !how.choice->fills()) return false;
  return !(has_levels(how) && how.choice->on_two_levels(dimension, dtype_of<V>)) &&
         is_for_filling(how.choice->dense().size(), dimension * sizeof(V));
}

// Of many entries.
template <class V, template <class> class Out>
Task<void> sum_many(Transport& net, SparseVector<V> mine, const SparseReduction& how, Out<V>& out) {
  if (knows_levels(how)) return allreduce_sparse_two_level(net, std::move(mine), how, out);
  return allreduce_by_slices(net, std::move(mine), how, out);
}

// A sum whose caller leaves the algorithm open (is_open()): recursive doubling, as long as nothing else is cheaper. Its messages
// have steps that no named algorithm comes to.
template <class V>
class OpenSum {
 public:
  OpenSum(Transport& net, SparseVector<V> mine, const SparseReduction& how, bool into_dense)
      : net_(net),
        mine_(std::move(mine)),
        how_(how),
        dimension_(mine_.dimension()),
        entries_(static_cast<double>(mine_.nnz())),
        choice_(how.choice ? how.choice : std::make_shared<SparseChoice>(AllreduceTable(net.size()))),
        decision_(*choice_,
                  {.ranks = net.size(),
                   .dimension = dimension_,
                   .dtype = dtype_of<V>,
                   .indices = how.wire.indices,
                   .packs_values = how.wire.packs_values,
                   .switch_factor = how.switch_factor,
                   .shares_memory = net.shares_memory(),
                   .fills = choice_->fills() && !std::is_same_v<V, CountedF32>,
                   .into_dense = into_dense},
                  expected_overlap(how), net.shares_memory(), knows_levels(how) ? how.nodes.get() : nullptr),
        doubling_(net, mine_, how, knows_levels(how) ? kOpenAboveLevels : kOpenSteps, &decision_) {}

  // Whether `out` has the sum; otherwise take_sum() has it.
  template <template <class> class Out>
  Task<bool> run(Out<V>& out) {
    const SparseVerdict verdict = co_await begin();
    switch (verdict) {
      case SparseVerdict::go_on: co_return false;
      case SparseVerdict::dense:
      case SparseVerdict::filled: {
        const DenseSum by{.filled = verdict == SparseVerdict::filled, .algorithm = decision_.dense_algorithm()};
        co_await allreduce_as_dense(net_, std::move(mine_), how_, by, out);
        break;
      }
      case SparseVerdict::flat_split: co_await allreduce_by_slices(net_, std::move(mine_), how_, out); break;
      case SparseVerdict::split: {
        std::vector<Task<void>> both;
        both.push_back(doubling_.hear_others());
        both.push_back(sum_many(net_, std::move(mine_), how_, out));
        co_await when_all(std::move(both));
        break;
      }
    }
    saw(out.entries(how_.reduction));
    co_return true;
  }

  OwnedSlice<V> take_sum() {
    OwnedSlice<V> sum = doubling_.take_sum();
    saw(entries_in(sum.view(), how_.reduction));
    return sum;
  }

 private:
  Task<SparseVerdict> begin() {
    const auto reads_where_they_lie = [](SparseVerdict verdict) {
      return verdict == SparseVerdict::filled || verdict == SparseVerdict::dense;
    };
    if (borrows_entries(mine_) && !reads_where_they_lie(decision_.alone(entries_, false))) co_await own_entries();
    const SparseVerdict verdict = co_await doubling_.run();
    if (borrows_entries(mine_) && !reads_where_they_lie(verdict)) co_await own_entries();
    co_return verdict;
  }

  // Copied first: what is checked must be what is used.
  Task<void> own_entries() {
    if constexpr (!std::is_same_v<V, CountedF32>) {
      const SparseView<V> claimed = mine_.view();
      Array<std::uint32_t> indices(claimed.nnz());
      Array<V> values(claimed.nnz());
      co_await copy(net_, std::as_bytes(claimed.indices), std::as_writable_bytes(indices.span()));
      co_await copy(net_, std::as_bytes(claimed.values), std::as_writable_bytes(values.span()));
      bool valid = false;
      co_await decide(net_, claimed.indices.size_bytes(),
                      [&] { valid = indices_error(claimed.range, indices.span()).empty(); });
      if (!valid) co_await fail_own_indices(net_, claimed.range.end);
      mine_ = SparseVector<V>::adopt_sparse(claimed.range.end, std::move(indices), std::move(values));
    }
  }

  // How many entries the sum has: later choices are better for it.
  void saw(double sum_entries) {
    if (entries_ == 0.0 || how_.observation == nullptr) return;
    const double overlap = overlap_of(dimension_, entries_, net_.size(), sum_entries);
    if (how_.sums_of_nodes) {
      how_.observation->saw_nodes(overlap);
    } else {
      how_.observation->saw_ranks(overlap);
    }
  }

  Transport& net_;
  SparseVector<V> mine_;
  const SparseReduction& how_;
  const std::uint64_t dimension_;
  const double entries_;
  const std::shared_ptr<SparseChoice> choice_;
  const SparseDecision decision_;
  SparseDoubling<V> doubling_;
};

template <class V, template <class> class Out>
Task<void> sum_to(Transport& net, SparseVector<V> mine, const SparseReduction& how, Out<V>& out) {
  if constexpr (std::is_same_v<V, f16>) {
    if (is_formed_in_f32<V>(how.reduction)) {
      SparseVector<float> wide;
      co_await widen_vector(net, std::move(mine), wide);
      SparseOutput<float> average;
      co_await sum_to(net, std::move(wide), how, average);
      SparseVector<V> halves;
      co_await narrow_vector(net, std::move(average.sum), halves);
      co_await out.take(net, std::move(halves), how);
      co_return;
    }
  }
  OwnedSlice<V> sum;
  if (how.algorithm == Algorithm::two_level) {
    co_await allreduce_sparse_two_level(net, std::move(mine), how, out);
    co_return;
  }
  if (is_open(net, how)) {
    OpenSum<V> open(net, std::move(mine), how, std::is_same_v<Out<V>, DenseOutput<V>>);
    const bool is_there = co_await open.run(out);
    if (is_there) co_return;
    sum = open.take_sum();
  } else if (how.algorithm == Algorithm::recursive_doubling) {
    SparseDoubling<V> doubling(net, mine, how, 0, nullptr);
    co_await doubling.run();
    sum = doubling.take_sum();
  } else {
    co_await sum_many(net, std::move(mine), how, out);
    co_return;
  }
  co_await out.take(net, std::move(sum), how);
}

}  // namespace

template <class V>
Task<SparseVector<V>> allreduce_sparse(Transport& net, SparseVector<V> mine, SparseReduction how) {
  SparseOutput<V> out;
  co_await sum_to(net, std::move(mine), how, out);
  co_return std::move(out.sum);
}

template <class V>
Task<void> allreduce_sparse_into(Transport& net, SparseVector<V> mine, SparseReduction how, std::span<V> output) {
  TELEGRAD_CHECK(output.size() == mine.dimension());
  DenseOutput<V> out{.vector = output};
  co_await sum_to(net, std::move(mine), how, out);
}

template <class V>
SparseReduction settings_of_call(SparseReduction how, std::uint64_t dimension) {
  TELEGRAD_CHECK(how.algorithm != Algorithm::recursive_doubling || how.wire.values == ValueEncoding::native);
  if (!has_levels(how)) how.nodes = nullptr;
  if (how.algorithm == Algorithm::two_level && !how.nodes) how.algorithm = Algorithm::automatic;
  if (how.algorithm != Algorithm::two_level && !may_take_levels<V>(how, dimension)) how.nodes = nullptr;
  const bool chooses = how.algorithm == Algorithm::automatic || how.algorithm == Algorithm::two_level;
  if (chooses && how.choice) how.observation = how.choice->observation({dimension, dtype_of<V>, how.reduction});
  return how;
}

template <class V>
bool begins_densely(std::uint64_t dimension, std::size_t entries, const SparseReduction& how) {
  return !how.flips_signs() && leaves_choice<V>(how) && !may_fill<V>(dimension, how) &&
         static_cast<double>(entries) > memory_delta<V>(dimension, how.switch_factor);
}

template <class V>
SparseVector<V> addend_of(std::uint64_t dimension, std::span<const std::uint32_t> indices, std::span<const V> values,
                          const SparseReduction& how, std::span<const std::uint64_t> marks) {
  const bool is_open = leaves_choice<V>(how) && !how.flips_signs();
  const bool is_full = indices.size() == dimension && values.size() == dimension;
  if (is_open && is_full && static_cast<double>(dimension) > memory_delta<V>(dimension, how.switch_factor)) {
    return SparseVector<V>::borrow_dense(values);
  }
  const bool borrows = is_open && may_fill<V>(dimension, how) && is_for_borrowing(dimension, static_cast<double>(values.size()));
  if (borrows && indices.size() == values.size()) {
    return SparseVector<V>::borrow_sparse(dimension, indices, values, marks);
  }
  if (!begins_densely<V>(dimension, values.size(), how)) return SparseVector<V>::sparse(dimension, indices, values);
  const Array<std::uint32_t> kept(indices.size());  // a copy: the caller's may change, even while they are checked
  std::ranges::copy(indices, kept.begin());
  validate_entries(dimension, kept.span(), values.size());
  Array<V> dense(static_cast<std::size_t>(dimension));
  write_dense(SparseView<V>{{0, dimension}, false, kept.span(), values}, dense.span(), how.reduction);
  return SparseVector<V>::adopt_dense(std::move(dense));
}

#define TELEGRAD_INSTANTIATE(V)                                                                           \
  template Task<SparseVector<V>> allreduce_sparse(Transport&, SparseVector<V>, SparseReduction);         \
  template Task<void> allreduce_sparse_into(Transport&, SparseVector<V>, SparseReduction, std::span<V>); \
  template SparseReduction settings_of_call<V>(SparseReduction, std::uint64_t);                          \
  template bool begins_densely<V>(std::uint64_t, std::size_t, const SparseReduction&);                   \
  template SparseVector<V> addend_of(std::uint64_t, std::span<const std::uint32_t>, std::span<const V>,  \
                                     const SparseReduction&, std::span<const std::uint64_t>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE
template Task<SparseVector<CountedF32>> allreduce_sparse(Transport&, SparseVector<CountedF32>, SparseReduction);
template SparseReduction settings_of_call<CountedF32>(SparseReduction, std::uint64_t);

}  // namespace telegrad
