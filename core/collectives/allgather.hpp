#pragma once

#include "collectives/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Every rank's `mine` in the order of ranks, whose lengths in bytes are `blocks`, the same on all ranks. `mine` may be
/// this rank's own block of `all`. Short blocks go by Bruck's algorithm, long ones round a ring. `all` is written only
/// once every rank has called.
Task<void> allgather(Transport& net, ConstBytes mine, Bytes all, Partition blocks);

}  // namespace telegrad
