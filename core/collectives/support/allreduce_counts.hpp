#pragma once

#include <cstdint>
#include <span>

#include "collectives/support/traffic.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// counts = the sums of all ranks' counts, of the last `maxima` of them the largest. All ranks pass as many. Sums are of
/// 64 bits and wrap round. Uses kCountSteps steps from `first_step` on.
Task<void> allreduce_counts(Transport& net, std::span<std::uint64_t> counts, std::size_t maxima, SparseTraffic& traffic,
                            Step first_step);
inline constexpr Step kCountSteps = 64;

}  // namespace telegrad
