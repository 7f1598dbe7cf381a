#include "codec/slice_reduction.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include "base/check.hpp"
#include "kernels/merge.hpp"
#include "kernels/reduce.hpp"
#include "kernels/scatter.hpp"

namespace telegrad {

template <class V>
SliceReduction<V>::SliceReduction(std::vector<SparseView<V>> pieces, Reduction reduction, double delta)
    : pieces_(std::move(pieces)), reduction_(reduction), delta_(delta) {
  TELEGRAD_CHECK(!pieces_.empty());
  done_ = range().begin;
  std::size_t total = 0;
  bool dense = false;
  for (const SparseView<V>& piece : pieces_) {
    TELEGRAD_CHECK(piece.range == range());
    dense = dense || piece.dense || static_cast<double>(piece.nnz()) > delta;
    total += piece.nnz();
  }
  sum_ = {range(), dense, {}, Array<V>(dense ? static_cast<std::size_t>(range().size()) : total)};
  if (!dense) sum_.indices = Array<std::uint32_t>(total);
}

template <class V>
void SliceReduction<V>::remember_givers() {
  TELEGRAD_CHECK(done_ == range().begin);
  const std::size_t total = sum_.indices.size();
  if (!sum_.dense && kernels::givers_pay<V>(reduction_, pieces_.size(), total, range().size())) givers_ = Array<std::uint8_t>(total);
}

template <class V>
std::size_t SliceReduction<V>::bytes() const {
  std::size_t bytes = 0;
  for (const SparseView<V>& piece : pieces_) bytes += bytes_of(piece);
  return bytes;
}

template <class V>
std::size_t SliceReduction<V>::advance(std::uint64_t end) {
  std::vector<SparseView<V>> parts;
  std::size_t bytes = 0;
  for (const SparseView<V>& piece : pieces_) {
    parts.push_back(piece.slice({done_, end}));
    bytes += bytes_of(parts.back());
  }
  if (sum_.dense) {
    const IndexRange part = parts[0].range;
    const std::span<V> sum = sum_.values.span().subspan(part.begin - range().begin, part.size());
    reduce_densely<V>(parts, reduction_, sum);
  } else {
    reduce_sparsely(parts);
  }
  done_ = end;
  return bytes;
}

template <class V>
void SliceReduction<V>::reduce_sparsely(const std::vector<SparseView<V>>& parts) {
  std::vector<kernels::Entries<V>> runs;
  for (const SparseView<V>& part : parts) runs.push_back(part.entries());
  const kernels::EntriesOut<V> out{sum_.indices.span().subspan(count_), sum_.values.span().subspan(count_)};
  count_ += givers_.empty() ? kernels::reduce_sorted<V>(reduction_, runs, out)
                            : kernels::reduce_sorted_of<V>(reduction_, runs, out, givers_.span().subspan(count_));
}

template <class V>
OwnedSlice<V> SliceReduction<V>::finish() {
  TELEGRAD_CHECK(done_ == range().end);
  if (sum_.dense) return std::move(sum_);
  sum_.indices.truncate(count_);
  sum_.values.truncate(count_);
  givers_.truncate(givers_.empty() ? 0 : count_);
  if (static_cast<double>(count_) <= delta_) return std::move(sum_);
  givers_ = {};
  return dense_slice(sum_.view(), reduction_);
}

#define TELEGRAD_INSTANTIATE(V) template class SliceReduction<V>;
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
