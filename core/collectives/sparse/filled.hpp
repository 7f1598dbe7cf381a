#pragma once

#include <cstdint>
#include <span>

#include "base/types.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// output = the reduction of all ranks' vectors, densely, the same bits on every rank (is_for_filling() of sparse/cost.hpp: CHECKed). Vectors may be sparse or dense, each as it likes; indices are checked here, and what is wrong
/// with them ends the operation. `output` does not overlap `mine`, and is written at once: all ranks have called. A rank
/// receives (P−1)/P·N bits and (P−1)/P·k values, and (P−1)/P·N values of the sum.
template <class V>
Task<void> allreduce_filled(Transport& net, SparseView<V> mine, Reduction reduction, std::span<V> output);

}  // namespace telegrad
