#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collectives/support/partition.hpp"
#include "collectives/support/traffic.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Slices of the index range, one for each rank, the same on all; and what there is to divide.
struct PooledSlices {
  Partition slices;
  std::uint64_t total = 0;  // entries of all ranks
  std::uint64_t most = 0;   // of the rank that has most; 0 where it is not known
};

/// Slices whose entries of all ranks together are to each other as `parts`, one for each rank, none 0: of T = `total` entries
/// none has more than its part plus the larger of P and `enough`, for any distribution, since one index is held by P ranks at
/// most. Equal lengths where there is no entry. `indices`: this rank's, ascending, below `dimension`; the other arguments are the same on all ranks. Uses
/// kSliceSteps steps from `first_step` on.
Task<Partition> pooled_slices(Transport& net, std::span<const std::uint32_t> indices, std::uint64_t dimension,
                              std::uint64_t total, std::vector<std::uint64_t> parts, std::uint64_t enough,
                              SparseTraffic& traffic, Step first_step);

/// No rank moves more for it, of at most T/P = `mean`.
std::uint64_t pooled_slices_bytes_most(std::uint64_t dimension, Rank ranks, std::uint64_t mean, std::uint64_t enough);

/// The same, to within P, in messages whose number and sizes follow from P and the dimension alone. `most` is not set: no
/// rank says it.
Task<PooledSlices> pooled_slices_in_fixed_rounds(Transport& net, std::span<const std::uint32_t> indices,
                                                 std::uint64_t dimension, SparseTraffic& traffic, Step first_step);

/// As Ok-Topk's paper has it (§3.1.1): every rank cuts its own entries in P alike parts, and boundaries are averaged. Where
/// ranks' entries lie in different places, an owner may get many times T/P. Uses kSliceSteps steps.
Task<PooledSlices> averaged_slices(Transport& net, std::span<const std::uint32_t> indices, std::uint64_t dimension,
                                   SparseTraffic& traffic, Step first_step);

inline constexpr Step kSliceSteps = Step{1} << 12;

}  // namespace telegrad
