#include "collectives/sparse/open.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <unordered_map>

#include "codec/counted.hpp"
#include "collectives/dense/allreduce.hpp"
#include "collectives/dense/allreduce_two_level.hpp"
#include "collectives/sparse/cost.hpp"
#include "collectives/sparse/filled.hpp"
#include "collectives/sparse/half_vectors.hpp"
#include "collectives/support/elements.hpp"
#include "kernels/marks.hpp"
#include "kernels/operations.hpp"
#include "kernels/reduce_marked.hpp"

namespace telegrad {
namespace {

constexpr Step kOpenSteps = Step{1} << 31;
constexpr Step kOpenAboveLevels = Step{3} << 30;  // what goes on two levels is open once more, between nodes

bool has_levels(const SparseReduction& how) { return how.nodes != nullptr && how.nodes->two_level(); }

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

// Whether what has filled in is summed as it is held, and not made dense before it is known how: on two levels, mostly.
template <class V>
bool may_fill(std::uint64_t dimension, const SparseReduction& how) {
  if (how.choice == nullptr || !how.choice->fills()) return false;
  return !(has_levels(how) && how.choice->on_two_levels(dimension, dtype_of<V>)) &&
         is_for_filling(how.choice->dense().size(), dimension * sizeof(V));
}

// A vector that is held as entries which nobody has checked. Each index is read once to be used, as the caller may change it
// meanwhile, and checked by the mark that it leaves. Before the last element is asked for all entries have been found.
template <class V>
class BorrowedEntries final : public InputMaker {
 public:
  BorrowedEntries(Transport& net, StreamView<V> claimed, Reduction reduction)
      : net_(net), claimed_(claimed), reduction_(reduction) {}

  Task<void> make(Range elements, Bytes out) override {
    return visit(elements, [this, out](Range block, std::span<const std::uint64_t> marks, std::span<const V> values) {
      kernels::expand_marks<V>(values_of(out, block), marks, values, kernels::absent_element<V>(reduction_));
    });
  }

  Task<void> reduce(Range elements, ConstBytes partial, Bytes out) override {
    return visit(elements, [this, partial, out](Range block, std::span<const std::uint64_t> marks, std::span<const V> values) {
      const std::span<const V> before(reinterpret_cast<const V*>(partial.data()) + block.begin, block.size());
      const std::array<kernels::MarkedValues<V>, 2> both{{{{}, before}, {marks, values}}};
      kernels::reduce_marked<V>(reduction_, both, values_of(out, block));
    });
  }

 private:
  static std::span<V> values_of(Bytes bytes, Range block) {
    return {reinterpret_cast<V*>(bytes.data()) + block.begin, block.size()};
  }

  // Calls what(block, its marks, its values) for blocks of these elements, counted from the first of them.
  template <class What>
  Task<void> visit(Range elements, What what) {
    constexpr std::size_t kBlock = std::size_t{16} << 10;  // elements, whose marks and values stay in the cache
    const Array<std::uint64_t> room(kernels::mark_words(kBlock));
    std::size_t next = place_of(elements.begin);
    const std::size_t first = next;
    for (std::size_t begin = elements.begin; begin < elements.end; begin += kBlock) {
      const Range block{begin, std::min(begin + kBlock, elements.end)};
      const auto marks = room.span().first(kernels::mark_words(block.size()));
      std::optional<std::size_t> count;
      co_await decide(net_, block.size() * sizeof(V), [&] {
        count = mark_block(claimed_, {block.begin, block.end}, next, marks);
        if (count) what({begin - elements.begin, block.end - elements.begin}, marks, claimed_.values.subspan(next, *count));
      });
      if (!count) co_await fail_own_indices(net_, claimed_.range.end);
      next += *count;
    }
    made_ += elements.size();
    found_ += next - first;
    const bool lacks_some = made_ == claimed_.range.size() && found_ != claimed_.nnz();
    if (next != place_of(elements.end) || lacks_some) co_await fail_own_indices(net_, claimed_.range.end);
  }

  // Where its entries begin; once for the two pieces that meet there, as the indices may change between them.
  std::size_t place_of(std::size_t element) {
    const auto [found, is_new] = places_.try_emplace(element, 0);
    if (is_new) {
      const auto first = std::ranges::lower_bound(claimed_.indices, element);
      found->second = static_cast<std::size_t>(first - claimed_.indices.begin());
    }
    return found->second;
  }

  Transport& net_;
  const StreamView<V> claimed_;
  const Reduction reduction_;
  std::unordered_map<std::size_t, std::size_t> places_;  // of pieces' ends
  std::size_t made_ = 0;   // elements
  std::size_t found_ = 0;  // entries
};

}  // namespace

template <class V>
double entries_in(const StreamView<V>& view, Reduction reduction) {
  const auto held = static_cast<double>(view.nnz());
  if constexpr (std::is_same_v<V, CountedF32>) {
    return held;
  } else {
    constexpr std::size_t kRun = 64;
    constexpr std::size_t kRuns = 256;
    if (!view.dense || view.values.empty()) return held;
    const auto absent = static_cast<float>(kernels::absent_element<V>(reduction));
    const std::size_t gap = std::max(kRun, view.values.size() / kRuns);
    std::size_t looked_at = 0;
    std::size_t present = 0;
    for (std::size_t begin = 0; begin < view.values.size(); begin += gap) {
      for (const V value : view.values.subspan(begin, std::min(kRun, view.values.size() - begin))) {
        present += static_cast<float>(value) != absent ? 1 : 0;
        ++looked_at;
      }
    }
    return held * static_cast<double>(present) / static_cast<double>(looked_at);
  }
}

template <class V>
Task<void> write_view(Transport& net, const StreamView<V>& view, std::span<V> output, Reduction reduction) {
  const std::uint64_t first = view.range.begin;
  co_await compute_slices(net, static_cast<std::size_t>(view.range.size()), sizeof(V),
                          [&view, first, output, reduction](std::size_t begin, std::size_t end) {
                            write_dense(view.slice({first + begin, first + end}),
                                        output.subspan(first + begin, end - begin), reduction);
                          });
}

template <class V>
bool begins_densely(std::uint64_t dimension, std::size_t entries, const SparseReduction& how) {
  return leaves_choice<V>(how) && !may_fill<V>(dimension, how) &&
         static_cast<double>(entries) > memory_delta<V>(dimension, how.switch_factor);
}

template <class V>
SparseStream<V> addend_of(std::uint64_t dimension, std::span<const std::uint32_t> indices, std::span<const V> values,
                          const SparseReduction& how, std::span<const std::uint64_t> marks) {
  const bool is_open = leaves_choice<V>(how);
  const bool is_full = indices.size() == dimension && values.size() == dimension;
  if (is_open && is_full && static_cast<double>(dimension) > memory_delta<V>(dimension, how.switch_factor)) {
    return SparseStream<V>::borrow_dense(values);
  }
  const bool borrows = is_open && may_fill<V>(dimension, how) && is_for_borrowing(dimension, static_cast<double>(values.size()));
  if (borrows && indices.size() == values.size()) {
    return SparseStream<V>::borrow_sparse(dimension, indices, values, marks);
  }
  if (!begins_densely<V>(dimension, values.size(), how)) return SparseStream<V>::sparse(dimension, indices, values);
  const Array<std::uint32_t> kept(indices.size());  // a copy: the caller's may change, even while they are checked
  std::ranges::copy(indices, kept.begin());
  validate_entries(dimension, kept.span(), values.size());
  Array<V> dense(static_cast<std::size_t>(dimension));
  write_dense(StreamView<V>{{0, dimension}, false, kept.span(), values}, dense.span(), how.reduction);
  return SparseStream<V>::adopt_dense(std::move(dense));
}

template <class V>
OpenSum<V>::OpenSum(Transport& net, SparseStream<V> mine, const SparseReduction& how, bool into_dense)
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

template <class V>
Task<SparseVerdict> OpenSum<V>::begin() {
  const auto reads_where_they_lie = [](SparseVerdict verdict) {
    return verdict == SparseVerdict::filled || verdict == SparseVerdict::dense;
  };
  if (borrows_entries() && !reads_where_they_lie(decision_.alone(entries_, false))) co_await own_entries();
  verdict_ = co_await doubling_.run();
  if (borrows_entries() && !reads_where_they_lie(verdict_)) co_await own_entries();
  co_return verdict_;
}

template <class V>
bool OpenSum<V>::borrows_entries() const {
  if constexpr (std::is_same_v<V, CountedF32>) {
    return false;
  } else {
    return mine_.is_borrowed() && !mine_.is_dense();
  }
}

// Copied first: what is checked must be what is used.
template <class V>
Task<void> OpenSum<V>::own_entries() {
  if constexpr (!std::is_same_v<V, CountedF32>) {
    const StreamView<V> claimed = mine_.view();
    Array<std::uint32_t> indices(claimed.nnz());
    Array<V> values(claimed.nnz());
    co_await copy(net_, std::as_bytes(claimed.indices), std::as_writable_bytes(indices.span()));
    co_await copy(net_, std::as_bytes(claimed.values), std::as_writable_bytes(values.span()));
    bool valid = false;
    co_await decide(net_, claimed.indices.size_bytes(),
                    [&] { valid = indices_error(claimed.range, indices.span()).empty(); });
    if (!valid) co_await fail_own_indices(net_, claimed.range.end);
    mine_ = SparseStream<V>::adopt_sparse(claimed.range.end, std::move(indices), std::move(values));
  }
}

template <class V>
OwnedSlice<V> OpenSum<V>::take_sum() {
  OwnedSlice<V> sum = doubling_.take_sum();
  saw(entries_in(sum.view(), how_.reduction));
  return sum;
}

template <class V>
Task<SparseStream<V>> OpenSum<V>::sum_densely() {
  if constexpr (std::is_same_v<V, CountedF32>) {
    const Array<V> values(static_cast<std::size_t>(mine_.dimension()));
    co_await sum_densely_into(values.span());
    co_return SparseStream<V>::dense(mine_.dimension());
  } else {
    if (mine_.is_dense() && !mine_.is_borrowed() && verdict_ == SparseVerdict::dense) {
      const Bytes values = std::as_writable_bytes(mine_.own_values());
      co_await sum_elements(values, values);
      co_return std::move(mine_);
    }
    Array<V> values(static_cast<std::size_t>(mine_.dimension()));
    co_await sum_densely_into(values.span());
    co_return SparseStream<V>::adopt_dense(std::move(values));
  }
}

template <class V>
Task<void> OpenSum<V>::sum_densely_into(std::span<V> output) {
  const StreamView<V> mine = mine_.view();
  const Bytes sum = std::as_writable_bytes(output);
  ConstBytes addend = sum;
  if constexpr (std::is_same_v<V, CountedF32>) {
    co_await decide(net_, output.size_bytes(), [] {});
  } else {
    if (verdict_ == SparseVerdict::filled) {
      co_await allreduce_filled(net_, mine, how_.reduction, output);
      saw_in(output);
      co_return;
    }
    if (mine.dense) {
      addend = std::as_bytes(mine.values);
    } else if (borrows_entries()) {
      BorrowedEntries<V> maker(net_, mine, how_.reduction);
      co_await sum_elements(sum, sum, &maker);
      co_return;
    } else {
      co_await write_view(net_, mine, output, how_.reduction);
    }
  }
  co_await sum_elements(addend, sum);
}

template <class V>
Task<void> OpenSum<V>::sum_elements(ConstBytes addend, Bytes sum, InputMaker* maker) {
  const Algorithm algorithm = decision_.dense_algorithm();
  if (algorithm == Algorithm::two_level) {
    if (maker != nullptr) co_await maker->make({0, static_cast<std::size_t>(dimension_)}, sum);
    co_await allreduce_two_level(net_, *how_.nodes, dtype_of<V>, how_.reduction, addend, sum);
  } else {
    co_await allreduce(net_, algorithm, dtype_of<V>, how_.reduction, addend, sum, maker);
  }
  saw_in({reinterpret_cast<const V*>(sum.data()), sum.size() / sizeof(V)});
}

template <class V>
void OpenSum<V>::saw_in(std::span<const V> sum) {
  if constexpr (std::is_same_v<V, CountedF32>) {
    saw(static_cast<double>(sum.size()));
  } else {
    saw(entries_in<V>({{0, dimension_}, true, {}, sum}, how_.reduction));
  }
}

template <class V>
void OpenSum<V>::saw(double sum_entries) {
  if (entries_ == 0.0 || how_.observation == nullptr) return;
  const double overlap = overlap_of(dimension_, entries_, net_.size(), sum_entries);
  if (how_.sums_of_nodes) {
    how_.observation->saw_nodes(overlap);
  } else {
    how_.observation->saw_ranks(overlap);
  }
}

#define TELEGRAD_INSTANTIATE(V) \
  template class OpenSum<V>;    \
  template double entries_in(const StreamView<V>&, Reduction);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
#undef TELEGRAD_INSTANTIATE
#define TELEGRAD_INSTANTIATE(V)                                                              \
  template bool begins_densely<V>(std::uint64_t, std::size_t, const SparseReduction&);      \
  template SparseStream<V> addend_of(std::uint64_t, std::span<const std::uint32_t>,         \
                                     std::span<const V>, const SparseReduction&,            \
                                     std::span<const std::uint64_t>);                       \
  template Task<void> write_view(Transport&, const StreamView<V>&, std::span<V>, Reduction);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
