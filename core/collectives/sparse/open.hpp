#pragma once

#include <memory>
#include <span>
#include <utility>

#include "base/types.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/sparse/choice.hpp"
#include "collectives/sparse/doubling.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/support/input_maker.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Rounding formats cannot be doubled: both partners would round what they hold in common.
inline bool is_open(const Transport& net, const SparseReduction& how) {
  return how.algorithm == Algorithm::automatic && net.size() > 1 && how.wire.values == ValueEncoding::native;
}

/// Whether it may go on two levels; what leaves no choice does.
inline bool knows_levels(const SparseReduction& how) {
  return how.algorithm == Algorithm::automatic && how.nodes != nullptr;
}

/// Whether a rank should hold so many entries densely before it calls: that takes less memory, the algorithm is open, as
/// two_level without two levels is, and the sum is not formed from entries as they are.
template <class V>
bool begins_densely(std::uint64_t dimension, std::size_t entries, const SparseReduction& how);

/// A rank's entries as its addend: copied, and checked as validate_entries does, which throws. Where a sum may read and
/// check them where they lie they are borrowed instead, and must stay as they are until it is over; so are the values of
/// all elements, whose indices can only be one. `marks`: of the indices, if the caller has them.
template <class V>
SparseStream<V> addend_of(std::uint64_t dimension, std::span<const std::uint32_t> indices, std::span<const V> values,
                          const SparseReduction& how, std::span<const std::uint64_t> marks = {});

/// A sum whose caller leaves the algorithm open (is_open()). Its messages have steps that no named algorithm comes to.
template <class V>
class OpenSum {
 public:
  /// `into_dense`: a sparse sum is to be written into a dense vector.
  OpenSum(Transport& net, SparseStream<V> mine, const SparseReduction& how, bool into_dense);

  /// go_on: take_sum() has the sum. dense, filled: sum_densely() or sum_densely_into() makes it. flat_split, split: the caller
  /// does, from take_mine(), and says saw(); split: beside doubling().hear_others().
  Task<SparseVerdict> begin();
  SparseDoubling<V>& doubling() { return doubling_; }
  OwnedSlice<V> take_sum();
  SparseStream<V> take_mine() { return std::move(mine_); }
  Task<SparseStream<V>> sum_densely();
  /// Every rank has said that it wants this: so all have called, and `output` may be written.
  Task<void> sum_densely_into(std::span<V> output);
  /// How many entries the sum has: later choices are better for it.
  void saw(double sum_entries);

 private:
  bool borrows_entries() const;
  Task<void> own_entries();
  Task<void> sum_elements(ConstBytes addend, Bytes sum, InputMaker* maker = nullptr);
  void saw_in(std::span<const V> sum);

  Transport& net_;
  SparseStream<V> mine_;
  const SparseReduction& how_;
  const std::uint64_t dimension_;
  const double entries_;
  const std::shared_ptr<SparseChoice> choice_;
  const SparseDecision decision_;
  SparseDoubling<V> doubling_;
  SparseVerdict verdict_ = SparseVerdict::go_on;
};

/// About how many entries a sum has: in what is dense, as many of a few elements here and there as are not absent.
template <class V>
double entries_in(const StreamView<V>& view, Reduction reduction);

/// output = view, in slices of work.
template <class V>
Task<void> write_view(Transport& net, const StreamView<V>& view, std::span<V> output, Reduction reduction);

}  // namespace telegrad
