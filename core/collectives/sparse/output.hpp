#pragma once
// Where a sum goes: it becomes a vector, or is written into a dense vector. Algorithms are written once for both. How its slices
// come, this must not know. Who has sent what is damaged is named: a slice may have gone through other hands.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/types.hpp"
#include "codec/assembly.hpp"
#include "codec/known_values.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/sparse/sections.hpp"
#include "collectives/support/allgather_any_size.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// About how many entries a sum has: in what is dense, as many of a few elements here and there as are not absent.
template <class V>
double entries_in(const SparseView<V>& view, Reduction reduction);

/// output = view, in slices of work.
template <class V>
Task<void> write_view(Transport& net, const SparseView<V>& view, std::span<V> output, Reduction reduction);

struct ClaimedSlice {
  Rank owner = 0;
  IndexRange range;
  std::uint64_t count = kDenseSlice;  // as its owner says
};

/// The vector of all slices, each of which is decoded to its place: once it is known how many entries those before it have.
template <class V>
class AssembledSum {
 public:
  AssembledSum(Transport& net, const SparseReduction& how) : net_(net), how_(how) {}

  /// `slices` cover the index range, in ascending order, at least one.
  Task<void> begin(std::vector<ClaimedSlice> slices);
  bool begun() const { return whole_.has_value(); }

  /// Once for each slice, after begin(). A message may be of either sort (known_values.hpp), of which this rank gave `given`.
  Task<void> place(std::size_t slice, SparseView<V> view);
  Task<void> place(std::size_t slice, ConstBytes message, const GivenEntries<V>& given = GivenEntries<V>::none());
  /// Of as many owners as slices, in one go.
  Task<void> place(std::span<const Arrived> batch);
  /// What its owner itself sends, as receive_vector() does.
  Task<void> receive(std::size_t slice, Step first_step, std::size_t most_bytes);
  /// Dense where a slice is, or where there are more than δ entries in memory.
  SparseVector<V> finish() { return whole_->finish(); }

 private:
  Transport::Failing fail(std::size_t slice, const std::string& error) {
    return fail_damaged(net_, slices_[slice].owner, "sums", error);
  }

  Transport& net_;
  const SparseReduction& how_;
  std::vector<ClaimedSlice> slices_;
  std::optional<VectorAssembly<V>> whole_;
};

/// The same, but written into a vector, and their entries counted, about.
template <class V>
class WrittenSum {
 public:
  WrittenSum(Transport& net, const SparseReduction& how, std::span<V> output, double& entries)
      : net_(net), how_(how), output_(output), entries_(entries) {}

  /// What is claimed of them does not matter. All ranks have called: `output` may be written.
  Task<void> begin(std::vector<ClaimedSlice> slices);
  bool begun() const { return !slices_.empty(); }

  Task<void> place(std::size_t slice, SparseView<V> view);
  Task<void> place(std::size_t slice, ConstBytes message, const GivenEntries<V>& given = GivenEntries<V>::none());

 private:
  Transport& net_;
  const SparseReduction& how_;
  const std::span<V> output_;
  double& entries_;
  std::vector<ClaimedSlice> slices_;
};

/// The sum becomes a vector.
template <class V>
struct SparseOutput {
  using Slices = AssembledSum<V>;

  /// Takes the slices of a sum, and then the sum from them.
  Slices slices(Transport& net, const SparseReduction& how) { return {net, how}; }
  void take(Slices& slices) { sum = slices.finish(); }
  /// A slice of all indices: dense where it is, or has more than δ entries in memory.
  Task<void> take(Transport& net, OwnedSlice<V> whole, const SparseReduction& how);
  Task<void> take(Transport&, SparseVector<V> whole, const SparseReduction&) {
    sum = std::move(whole);
    co_return;
  }
  /// About how many the sum has.
  double entries(Reduction reduction) const { return entries_in(sum.view(), reduction); }

  SparseVector<V> sum{};
};

/// The sum is written into `vector`, which has as many elements as the dimension; only once this rank has heard, directly or
/// through others, from every other.
template <class V>
struct DenseOutput {
  using Slices = WrittenSum<V>;

  Slices slices(Transport& net, const SparseReduction& how) { return {net, how, vector, counted}; }
  void take(Slices&) {}
  Task<void> take(Transport& net, OwnedSlice<V> whole, const SparseReduction& how);
  Task<void> take(Transport& net, SparseVector<V> whole, const SparseReduction& how);
  double entries(Reduction) const { return counted; }

  std::span<V> vector{};
  double counted = 0.0;  // entries, about; of those algorithms that may be chosen by what earlier sums had
};

// Instantiates a source's templates for each output: instantiate(V, Output).
#define TELEGRAD_FOR_SPARSE_OUTPUTS(instantiate)                       \
  instantiate(float, SparseOutput) instantiate(float, DenseOutput)     \
  instantiate(double, SparseOutput) instantiate(double, DenseOutput)   \
  instantiate(bf16, SparseOutput) instantiate(bf16, DenseOutput)       \
  instantiate(f16, SparseOutput) instantiate(f16, DenseOutput)         \
  instantiate(std::int32_t, SparseOutput) instantiate(std::int32_t, DenseOutput) \
  instantiate(std::int64_t, SparseOutput) instantiate(std::int64_t, DenseOutput) \
  instantiate(CountedF32, SparseOutput)

}  // namespace telegrad
