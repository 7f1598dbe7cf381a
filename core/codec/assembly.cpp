#include "codec/assembly.hpp"

#include <utility>

#include "base/check.hpp"
#include "base/copy.hpp"
#include "codec/wire.hpp"
#include "kernels/entries.hpp"

namespace telegrad {
namespace {

bool goes_dense(const std::vector<SliceContent>& slices, double delta) {
  TELEGRAD_CHECK(!slices.empty() && slices.front().range.begin == 0);
  std::uint64_t end = 0;
  std::uint64_t total = 0;
  bool dense = false;
  for (const SliceContent& slice : slices) {
    TELEGRAD_CHECK(slice.range.begin == end && slice.range.end >= end && slice.nnz <= slice.range.size());
    end = slice.range.end;
    total += slice.nnz;
    dense = dense || slice.dense;
  }
  return dense || static_cast<double>(total) > delta;
}

}  // namespace

template <class V>
VectorAssembly<V>::VectorAssembly(std::vector<SliceContent> slices, Reduction reduction, double delta)
    : slices_(std::move(slices)), reduction_(reduction), dense_(telegrad::goes_dense(slices_, delta)) {
  std::size_t total = 0;
  for (const SliceContent& slice : slices_) {
    first_.push_back(total);
    total += static_cast<std::size_t>(slice.nnz);
  }
  if (dense_) {
    values_ = Array<V>(static_cast<std::size_t>(slices_.back().range.end));
    return;
  }
  indices_ = Array<std::uint32_t>(total);
  values_ = Array<V>(total);
}

template <class V>
std::string VectorAssembly<V>::place(std::size_t slice, ConstBytes message, const GivenEntries<V>& given) {
  const auto& [range, dense, nnz] = slices_[slice];
  if (!dense_) {
    const SlicePlace<V> own = *place_of(slice);
    return decode_sum_into<V>(message, range, given, own.indices, own.values);
  }
  const Decoded<V> decoded = decode_sum<V>(message, range, given);
  if (decoded.ok()) place(slice, decoded.view());
  return decoded.error();
}

template <class V>
void VectorAssembly<V>::place(std::size_t slice, const SparseView<V>& view) {
  const auto& [range, dense, nnz] = slices_[slice];
  TELEGRAD_CHECK(view.range == range && (dense_ || (!view.dense && view.nnz() == nnz)));
  if (dense_) {
    write_dense(view, values_.span().subspan(range.begin, range.size()), reduction_);
    return;
  }
  const SlicePlace<V> own = *place_of(slice);
  copy_bytes(own.indices.data(), view.indices.data(), view.indices.size_bytes());
  copy_bytes(own.values.data(), view.values.data(), view.values.size_bytes());
}

template <class V>
std::optional<SlicePlace<V>> VectorAssembly<V>::place_of(std::size_t slice) {
  const auto& [range, dense, nnz] = slices_[slice];
  if (dense_ && !dense) return std::nullopt;
  if (dense) return SlicePlace<V>{{}, values_.span().subspan(range.begin, range.size())};
  const auto count = static_cast<std::size_t>(nnz);
  return SlicePlace<V>{indices_.span().subspan(first_[slice], count), values_.span().subspan(first_[slice], count)};
}

template <class V>
SparseVector<V> VectorAssembly<V>::finish() {
  if (dense_) return SparseVector<V>::adopt_dense(std::move(values_));
  return SparseVector<V>::adopt_sparse(slices_.back().range.end, std::move(indices_), std::move(values_));
}

#define TELEGRAD_INSTANTIATE(V) template class VectorAssembly<V>;
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

VectorAssembly<CountedF32>::VectorAssembly(std::vector<SliceContent> slices, Reduction, double delta)
    : slices_(std::move(slices)), dense_(goes_dense(slices_, delta)) {}

std::string VectorAssembly<CountedF32>::place(std::size_t slice, ConstBytes message,
                                              const GivenEntries<CountedF32>& given) {
  const Decoded<CountedF32> decoded = decode_sum<CountedF32>(message, slices_[slice].range, given);
  if (!decoded.ok()) return decoded.error();
  const SparseView<CountedF32> view = decoded.view();
  if (view.dense != slices_[slice].dense || view.nnz() != slices_[slice].nnz) {
    return "it does not hold what was announced";
  }
  place(slice, view);
  return {};
}

void VectorAssembly<CountedF32>::place(std::size_t, const SparseView<CountedF32>& view) {
  entries_.common += view.entries.common;
  entries_.own += view.entries.own;
}

SparseVector<CountedF32> VectorAssembly<CountedF32>::finish() {
  const std::uint64_t dimension = slices_.back().range.end;
  return dense_ ? SparseVector<CountedF32>::dense(dimension) : SparseVector<CountedF32>::sparse(dimension, entries_);
}

}  // namespace telegrad
