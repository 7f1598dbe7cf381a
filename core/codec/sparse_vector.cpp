#include "codec/sparse_vector.hpp"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/check.hpp"
#include "base/copy.hpp"
#include "kernels/marks.hpp"
#include "kernels/merge.hpp"
#include "kernels/operations.hpp"
#include "kernels/reduce.hpp"
#include "kernels/scale.hpp"
#include "kernels/scan.hpp"
#include "kernels/scatter.hpp"

namespace telegrad {
namespace {

void validate_dimension(std::uint64_t dimension) {
  if (dimension <= kDimensionMost) return;
  throw std::invalid_argument("dimension is " + std::to_string(dimension) +
                              ": a sparse vector has 32-bit indices, so at most " + std::to_string(kDimensionMost) +
                              " elements; split it into several");
}

template <class T>
void copy(std::span<const T> from, std::span<T> to) {
  copy_bytes(to.data(), from.data(), from.size_bytes());
}

template <class T>
Array<T> copy_of(std::span<const T> from) {
  Array<T> to(from.size());
  copy(from, to.span());
  return to;
}

// The second one's indices all lie above the first one's.
template <class V>
SparseVector<V> concatenate(const SparseVector<V>& first, const SparseVector<V>& second) {
  Array<std::uint32_t> indices(first.nnz() + second.nnz());
  Array<V> values(indices.size());
  copy(first.indices(), indices.span().first(first.nnz()));
  copy(second.indices(), indices.span().subspan(first.nnz()));
  copy(first.values(), values.span().first(first.nnz()));
  copy(second.values(), values.span().subspan(first.nnz()));
  return SparseVector<V>::adopt_sparse(first.dimension(), std::move(indices), std::move(values));
}

template <class V>
SparseVector<V> merge(const SparseVector<V>& a, const SparseVector<V>& b, Reduction reduction) {
  Array<std::uint32_t> indices(a.nnz() + b.nnz());
  Array<V> values(indices.size());
  const std::size_t count = kernels::merge(reduction, a.view().entries(), b.view().entries(),
                                           kernels::EntriesOut<V>{indices.span(), values.span()});
  indices.truncate(count);
  values.truncate(count);
  return SparseVector<V>::adopt_sparse(a.dimension(), std::move(indices), std::move(values));
}

// Adds to a dense vector.
template <class V>
void accumulate(SparseVector<V>& total, const SparseVector<V>& next, Reduction reduction) {
  if (next.is_dense()) {
    const Bytes values = std::as_writable_bytes(total.own_values());
    kernels::reduce_to(dtype_of<V>, reduction, values, std::as_bytes(next.values()), values);
  } else {
    kernels::scatter_reduce(reduction, total.own_values(), next.view().entries());
  }
}

}  // namespace

void validate_entries(std::uint64_t dimension, std::span<const std::uint32_t> indices, std::size_t values) {
  validate_dimension(dimension);
  if (indices.size() != values) {
    throw std::invalid_argument("there are " + std::to_string(indices.size()) + " indices but " +
                                std::to_string(values) + " values: give one value for each index");
  }
  if (!kernels::strictly_increasing(indices)) {
    std::size_t i = 1;
    while (indices[i] > indices[i - 1]) ++i;
    throw std::invalid_argument("indices[" + std::to_string(i) + "] = " + std::to_string(indices[i]) +
                                " is not above indices[" + std::to_string(i - 1) + "] = " +
                                std::to_string(indices[i - 1]) +
                                ": indices must be strictly increasing; sort them and add up duplicates first");
  }
  if (!indices.empty() && indices.back() >= dimension) {
    const auto first = std::lower_bound(indices.begin(), indices.end(), dimension);
    throw std::invalid_argument("indices[" + std::to_string(first - indices.begin()) +
                                "] = " + std::to_string(*first) + " is out of range: the dimension is " +
                                std::to_string(dimension) + ", and every index must be below it");
  }
}

template <class V>
SparseView<V> SparseView<V>::slice(IndexRange within) const {
  TELEGRAD_CHECK(range.begin <= within.begin && within.begin <= within.end && within.end <= range.end);
  if (dense) return {within, true, {}, values.subspan(within.begin - range.begin, within.size())};
  const auto first = std::lower_bound(indices.begin(), indices.end(), within.begin);
  const auto last = std::lower_bound(first, indices.end(), within.end);
  const auto skipped = static_cast<std::size_t>(first - indices.begin());
  const auto count = static_cast<std::size_t>(last - first);
  return {within, false, indices.subspan(skipped, count), values.subspan(skipped, count)};
}

template <class V>
std::optional<std::size_t> mark_block(const SparseView<V>& view, IndexRange block, std::size_t before,
                                      std::span<std::uint64_t> marks) {
  const auto size = static_cast<std::size_t>(block.size());
  const std::size_t left = view.nnz() - before;
  if (!view.marks.empty()) {
    kernels::slice_marks(view.marks, static_cast<std::size_t>(block.begin), size, marks);
    const std::size_t count = kernels::count_marks(marks);
    return count <= left ? std::optional(count) : std::nullopt;
  }
  const auto rest = view.indices.subspan(before, std::min(size, left));
  const auto count = static_cast<std::size_t>(std::ranges::lower_bound(rest, block.end) - rest.begin());
  const bool ordered = kernels::mark(rest.first(count), block.begin, size, marks);
  return ordered && kernels::count_marks(marks) == count ? std::optional(count) : std::nullopt;
}

template <class V>
void write_dense(const SparseView<V>& view, std::span<V> out, Reduction reduction, double factor) {
  TELEGRAD_CHECK(out.size() == view.range.size());
  constexpr std::size_t kBlock = 8192;  // cleared and written, or copied and scaled, while in the cache
  if (!view.dense) {
    SparseView<V> rest = view;
    for (std::size_t begin = 0; begin < out.size(); begin += kBlock) {
      const std::size_t count = std::min(kBlock, out.size() - begin);
      const std::uint64_t first = view.range.begin + begin;
      const std::size_t most = std::min(count, rest.indices.size());  // no two have one index
      const auto end = std::lower_bound(rest.indices.begin(), rest.indices.begin() + static_cast<std::ptrdiff_t>(most),
                                        first + count);
      const auto taken = static_cast<std::size_t>(end - rest.indices.begin());
      const kernels::Entries<V> entries{rest.indices.first(taken), rest.values.first(taken)};
      kernels::expand(out.subspan(begin, count), entries, kernels::absent_element<V>(reduction), factor, first);
      rest.indices = rest.indices.subspan(taken);
      rest.values = rest.values.subspan(taken);
    }
    return;
  }
  for (std::size_t begin = 0; begin < out.size(); begin += kBlock) {
    const std::size_t count = std::min(kBlock, out.size() - begin);
    copy(view.values.subspan(begin, count), out.subspan(begin, count));
    if (factor != 1.0) kernels::scale(dtype_of<V>, std::as_writable_bytes(out.subspan(begin, count)), factor);
  }
}

template <class V>
SparseVector<V>::SparseVector(std::uint64_t dimension) : dimension_(dimension) {
  validate_dimension(dimension);
}

template <class V>
SparseVector<V> SparseVector<V>::sparse(std::uint64_t dimension, std::span<const std::uint32_t> indices,
                                        std::span<const V> values) {
  Array<std::uint32_t> kept = copy_of(indices);  // first: the caller's may change, even while they are checked
  validate_entries(dimension, kept.span(), values.size());
  return adopt_sparse(dimension, std::move(kept), copy_of(values));
}

template <class V>
SparseVector<V> SparseVector<V>::dense(std::span<const V> values) {
  validate_dimension(values.size());
  return adopt_dense(copy_of(values));
}

template <class V>
SparseVector<V> SparseVector<V>::borrow_dense(std::span<const V> values) {
  SparseVector vector(values.size());
  vector.dense_ = true;
  vector.borrowed_ = values;
  return vector;
}

template <class V>
SparseVector<V> SparseVector<V>::borrow_sparse(std::uint64_t dimension, std::span<const std::uint32_t> indices,
                                               std::span<const V> values, std::span<const std::uint64_t> marks) {
  TELEGRAD_CHECK(indices.size() == values.size());
  TELEGRAD_CHECK(marks.empty() || marks.size() == kernels::mark_words(static_cast<std::size_t>(dimension)));
  SparseVector vector(dimension);
  vector.borrowed_ = values;
  vector.borrowed_indices_ = indices;
  vector.borrowed_marks_ = marks;
  return vector;
}

template <class V>
std::span<V> SparseVector<V>::own_values() {
  TELEGRAD_CHECK(dense_ || !is_borrowed());
  if (is_borrowed()) values_ = copy_of(std::exchange(borrowed_, {}));
  return values_.span();
}

template <class V>
SparseVector<V> SparseVector<V>::adopt_sparse(std::uint64_t dimension, Array<std::uint32_t> indices,
                                              Array<V> values) {
  TELEGRAD_CHECK(indices.size() == values.size());
  if (!indices.empty()) {
    const std::uint32_t last = indices[indices.size() - 1];
    TELEGRAD_CHECK(indices[0] <= last && last < dimension);
  }
  SparseVector vector(dimension);
  vector.indices_ = std::move(indices);
  vector.values_ = std::move(values);
  return vector;
}

template <class V>
SparseVector<V> SparseVector<V>::adopt_dense(Array<V> values) {
  SparseVector vector(values.size());
  vector.dense_ = true;
  vector.values_ = std::move(values);
  return vector;
}

template <class V>
SparseVector<V> SparseVector<V>::clone() const {
  SparseVector vector(dimension_);
  vector.dense_ = dense_;
  vector.indices_ = copy_of(indices());
  vector.values_ = copy_of(values());
  return vector;
}

template <class V>
void SparseVector<V>::to_dense(Reduction reduction) {
  if (dense_) return;
  Array<V> values(static_cast<std::size_t>(dimension_));
  kernels::fill(values.span(), kernels::absent_element<V>(reduction));
  kernels::scatter_reduce(reduction, values.span(), view().entries());  // not set: reduce() relies on -0 going
  dense_ = true;
  indices_ = Array<std::uint32_t>();
  values_ = std::move(values);
}

template <class V>
void SparseVector<V>::write_dense(std::span<V> out, Reduction reduction, double factor) const {
  if (out.size() != dimension_) {
    throw std::invalid_argument("out has " + std::to_string(out.size()) + " elements but the vector's dimension is " +
                                std::to_string(dimension_) + ": give an output of that size");
  }
  telegrad::write_dense(view(), out, reduction, factor);
}

template <class V>
void SparseVector<V>::scale(double factor) {
  kernels::scale(dtype_of<V>, std::as_writable_bytes(own_values()), factor);
}

double switch_entries(std::uint64_t n, std::size_t value_bytes, std::size_t index_bytes, double factor) {
  if (!(factor >= 0.0)) {
    throw std::invalid_argument("switch factor is " + std::to_string(factor) +
                                ": it must not be negative; 1 switches where both forms take the same bytes");
  }
  if (n == 0) return 0.0;  // also where the factor is infinite, so that nothing goes dense
  const auto value = static_cast<double>(value_bytes);
  return factor * static_cast<double>(n) * value / (static_cast<double>(index_bytes) + value);
}

template <class V>
SparseVector<V> reduce(SparseVector<V> a, SparseVector<V> b, Reduction reduction, double delta) {
  if (a.dimension() != b.dimension()) {
    throw std::invalid_argument("vectors of dimension " + std::to_string(a.dimension()) + " and " +
                                std::to_string(b.dimension()) + " cannot be reduced: give vectors of one dimension");
  }
  const bool fits = static_cast<double>(a.nnz()) + static_cast<double>(b.nnz()) <= delta;
  if (!a.is_dense() && !b.is_dense() && fits) {
    if (a.nnz() == 0) return b;
    if (b.nnz() == 0) return a;
    if (a.indices().back() < b.indices().front()) return concatenate(a, b);
    if (b.indices().back() < a.indices().front()) return concatenate(b, a);
    return merge(a, b, reduction);
  }
  if (!a.is_dense() && b.is_dense()) std::swap(a, b);
  a.to_dense(reduction);
  accumulate(a, b, reduction);
  return a;
}

#define TELEGRAD_INSTANTIATE(V)                                                       \
  template struct SparseView<V>;                                                      \
  template class SparseVector<V>;                                                     \
  template std::optional<std::size_t> mark_block(const SparseView<V>&, IndexRange, std::size_t, std::span<std::uint64_t>); \
  template void write_dense(const SparseView<V>&, std::span<V>, Reduction, double);   \
  template SparseVector<V> reduce(SparseVector<V>, SparseVector<V>, Reduction, double);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
