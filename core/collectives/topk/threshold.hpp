#pragma once
// The k-th largest magnitude of values that lie on several ranks, without moving them.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "collectives/support/traffic.hpp"
#include "collectives/topk/largest.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Of a magnitude's key, behind the exponent.
template <class V>
inline constexpr unsigned kMantissaBits = static_cast<unsigned>(
    std::countr_zero(static_cast<std::uint64_t>(static_cast<kernels::Format<V>::Bits>(kernels::Format<V>::kInfinity))));

/// The key of the k-th largest magnitude of all ranks' values together, k >= 1, the same on all ranks; 0, the least key,
/// if there are fewer. No rank has more than `most` values. V is float, double, bf16 or f16. Uses kThresholdSteps steps from `first_step` on.
template <class V>
Task<std::uint64_t> global_threshold_key(Transport& net, std::span<const V> values, std::uint64_t k, std::uint64_t most,
                                         SparseTraffic& traffic, Step first_step);
/// No rank moves more for it, of at most `total` values.
template <class V>
std::uint64_t threshold_bytes_most(std::uint64_t k, Rank ranks, std::uint64_t total);
inline constexpr Step kThresholdSteps = Step{1} << 12;

}  // namespace telegrad
