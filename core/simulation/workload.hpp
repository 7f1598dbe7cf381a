#pragma once
// The inputs of a measured operation: what makes sense, and what real ones hold.

#include <cstdint>
#include <memory>
#include <vector>

#include "collectives/support/nodes.hpp"
#include "simulation/measure.hpp"

namespace telegrad {

/// Throws std::invalid_argument, naming the argument, its value and the remedy.
void validate(const Workload& workload);

/// Who lives together, by the costs' ranks per node.
std::shared_ptr<const Nodes> nodes_of(const Workload& workload);

/// Entries of each rank at indices that all have in common.
std::uint64_t common_entries(const Workload& workload);
/// Element `i` of rank `rank`'s vector: a small integer.
float value_of(const Workload& workload, Rank rank, std::uint64_t i);
/// How far an encoded value may be from what it decodes to, as a part of the largest magnitude encoded with it.
double rounding_of(ValueEncoding encoding);
/// Whether each value is rounded by itself; otherwise those of a block or a message share a scale.
bool has_own_scale(ValueEncoding encoding);
/// By how much an element of a sparse sum of such values may be off: 0 where values are sent as they are.
double rounding_most(const Workload& workload);
/// nnz ascending indices.
std::vector<std::uint32_t> indices_of(const Workload& workload, Rank rank);

}  // namespace telegrad
