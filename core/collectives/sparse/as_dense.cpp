// The sum of sparse vectors that has filled in, by an algorithm for dense ones: Renggli et al., "SparCML: high-performance sparse
// communication for machine learning", SC 2019, §5.3.3. A vector that is dense already is summed where it lies. Of other entries a
// vector is made first or, round a ring, piece by piece as it is sent; allreduce_filled() makes none.
#include "collectives/sparse/as_dense.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "collectives/dense/allreduce.hpp"
#include "collectives/dense/allreduce_two_level.hpp"
#include "collectives/sparse/filled.hpp"
#include "collectives/support/input_maker.hpp"
#include "kernels/marks.hpp"
#include "kernels/operations.hpp"
#include "kernels/reduce_marked.hpp"

namespace telegrad {
namespace {

// A vector that is held as entries which nobody has checked. Each index is read once to be used, as the caller may change it
// meanwhile, and checked by the mark that it leaves. Before the last element is asked for all entries have been found.
template <class V>
class BorrowedEntries final : public InputMaker {
 public:
  BorrowedEntries(Transport& net, SparseView<V> claimed, Reduction reduction)
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
  const SparseView<V> claimed_;
  const Reduction reduction_;
  std::unordered_map<std::size_t, std::size_t> places_;  // of pieces' ends
  std::size_t made_ = 0;   // elements
  std::size_t found_ = 0;  // entries
};

template <class V>
Task<void> sum_elements(Transport& net, const SparseReduction& how, Algorithm algorithm, ConstBytes addend, Bytes sum,
                        InputMaker* maker = nullptr) {
  if (algorithm != Algorithm::two_level) {
    co_await allreduce(net, algorithm, dtype_of<V>, how.reduction, addend, sum, maker);
    co_return;
  }
  if (maker != nullptr) co_await maker->make({0, sum.size() / sizeof(V)}, sum);
  co_await allreduce_two_level(net, *how.nodes, dtype_of<V>, how.reduction, addend, sum);
}

template <class V>
Task<void> sum_into(Transport& net, const SparseVector<V>& mine, const SparseReduction& how, DenseSum by,
                    std::span<V> output) {
  const SparseView<V> view = mine.view();
  const Bytes sum = std::as_writable_bytes(output);
  ConstBytes addend = sum;
  if constexpr (std::is_same_v<V, CountedF32>) {
    co_await decide(net, output.size_bytes(), [] {});
  } else {
    if (by.filled) {
      co_await allreduce_filled(net, view, how.reduction, output);
      co_return;
    }
    if (borrows_entries(mine)) {
      BorrowedEntries<V> maker(net, view, how.reduction);
      co_await sum_elements<V>(net, how, by.algorithm, sum, sum, &maker);
      co_return;
    }
    if (view.dense) {
      addend = std::as_bytes(view.values);
    } else {
      co_await write_view(net, view, output, how.reduction);
    }
  }
  co_await sum_elements<V>(net, how, by.algorithm, addend, sum);
}

// Where the sum lies: `mine` itself, if that is dense and may be changed.
template <class V>
Task<void> sum_to(Transport& net, SparseVector<V> mine, const SparseReduction& how, DenseSum by, SparseOutput<V>& out) {
  if constexpr (std::is_same_v<V, CountedF32>) {
    const Array<V> values(static_cast<std::size_t>(mine.dimension()));
    co_await sum_into(net, mine, how, by, values.span());
    out.sum = SparseVector<V>::dense(mine.dimension());
  } else {
    if (mine.is_dense() && !mine.is_borrowed() && !by.filled) {
      const Bytes values = std::as_writable_bytes(mine.own_values());
      co_await sum_elements<V>(net, how, by.algorithm, values, values);
      out.sum = std::move(mine);
      co_return;
    }
    Array<V> values(static_cast<std::size_t>(mine.dimension()));
    co_await sum_into(net, mine, how, by, values.span());
    out.sum = SparseVector<V>::adopt_dense(std::move(values));
  }
}

template <class V>
Task<void> sum_to(Transport& net, SparseVector<V> mine, const SparseReduction& how, DenseSum by, DenseOutput<V>& out) {
  co_await sum_into(net, mine, how, by, out.vector);
  out.counted = entries_in<V>({{0, out.vector.size()}, true, {}, out.vector}, how.reduction);
}

}  // namespace

template <class V, template <class> class Out>
Task<void> allreduce_as_dense(Transport& net, SparseVector<V> mine, const SparseReduction& how, DenseSum by, Out<V>& out) {
  return sum_to(net, std::move(mine), how, by, out);
}

#define TELEGRAD_INSTANTIATE(V, Out)                                                                                   \
  template Task<void> allreduce_as_dense(Transport&, SparseVector<V>, const SparseReduction&, DenseSum, Out<V>&);
TELEGRAD_FOR_SPARSE_OUTPUTS(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
