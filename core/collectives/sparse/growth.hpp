#pragma once
// How many entries a sum of sparse streams has, before it is there. Some of a stream's entries are at indices that all
// ranks have in common, its `overlap`; the others are independent, uniform. Which algorithms there are, this must not know.
//
// An index that is not common is missing in the sum of m streams with probability q^m: it has N − (N − C)·q^m entries, of
// which C are common. With C = 0 that is K = N(1 − (1 − d)^m) of Renggli et al., "SparCML", SC 2019, §5.3.

#include <cstdint>

#include "base/types.hpp"

namespace telegrad {

class SumGrowth {
 public:
  /// Streams of `entries` entries, of which the share `overlap` is common.
  SumGrowth(std::uint64_t dimension, double entries, double overlap);

  /// As the sums of half as many and of 2^doublings (at least 2) streams had `half` entries, on average, and `full`. Only
  /// operations that IEEE 754 rounds: it is the same number on all machines.
  static SumGrowth seen(std::uint64_t dimension, double half, double full, unsigned doublings);

  /// Of the sum of so many streams.
  double entries(double streams) const;
  /// Of 2^doublings, the same on all machines.
  double entries_doubled(unsigned doublings) const;
  /// The same streams, of which each is the sum of `streams`.
  SumGrowth of_sums(double streams) const;
  /// The same of 2^doublings, the same on all machines.
  SumGrowth of_sums_doubled(unsigned doublings) const;
  /// Of the streams' entries in one of so many equal slices of the range.
  SumGrowth of_slice(double slices) const;

 private:
  SumGrowth() = default;

  double dimension_ = 0;
  double elsewhere_ = 0;     // N − C
  double missing_ = 1;  // q
};

/// The overlap with which `ranks` streams of `entries` entries have a sum of `sum_entries`: between 0 and 1. The inverse of
/// SumGrowth.
double overlap_of(std::uint64_t dimension, double entries, Rank ranks, double sum_entries);

}  // namespace telegrad
