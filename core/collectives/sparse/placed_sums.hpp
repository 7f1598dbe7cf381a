#pragma once
// Where the slices of a sum come to lie: in one stream, or written into a vector. How they come, this must not know. Who has
// sent what is damaged is named: a slice may have gone through other hands.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/types.hpp"
#include "codec/assembly.hpp"
#include "codec/known_values.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/sparse/sections.hpp"
#include "collectives/support/allgather_any_size.hpp"
#include "transport/transport.hpp"

namespace telegrad {

struct ClaimedSlice {
  Rank owner = 0;
  IndexRange range;
  std::uint64_t count = kDenseSlice;  // as its owner says
};

/// The stream of all slices, each of which is decoded to its place: once it is known how many entries those before it have.
template <class V>
class AssembledSum {
 public:
  AssembledSum(Transport& net, const SparseReduction& how) : net_(net), how_(how) {}

  /// `slices` cover the index range, in ascending order, at least one.
  Task<void> begin(std::vector<ClaimedSlice> slices);
  bool begun() const { return whole_.has_value(); }

  /// Once for each slice, after begin(). A message may be of either sort (known_values.hpp), of which this rank gave `given`.
  Task<void> place(std::size_t slice, StreamView<V> view);
  Task<void> place(std::size_t slice, ConstBytes message, const GivenEntries<V>& given = GivenEntries<V>::none());
  /// Of as many owners as slices, in one go.
  Task<void> place(std::span<const Arrived> batch);
  /// What its owner itself sends, as receive_stream() does.
  Task<void> receive(std::size_t slice, Step first_step, std::size_t most_bytes);
  /// Dense where a slice is, or where there are more than δ entries in memory.
  SparseStream<V> finish() { return whole_->finish(); }

 private:
  Transport::Failing fail(std::size_t slice, const std::string& error) {
    return fail_damaged(net_, slices_[slice].owner, "sums", error);
  }

  Transport& net_;
  const SparseReduction& how_;
  std::vector<ClaimedSlice> slices_;
  std::optional<StreamAssembly<V>> whole_;
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

  Task<void> place(std::size_t slice, StreamView<V> view);
  Task<void> place(std::size_t slice, ConstBytes message, const GivenEntries<V>& given = GivenEntries<V>::none());

 private:
  Transport& net_;
  const SparseReduction& how_;
  const std::span<V> output_;
  double& entries_;
  std::vector<ClaimedSlice> slices_;
};

}  // namespace telegrad
