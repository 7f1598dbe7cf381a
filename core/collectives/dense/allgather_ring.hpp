#pragma once

#include "collectives/dense/allgather.hpp"
#include "collectives/support/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// allgather() for long blocks: each rank sends and receives all bytes but one block, and needs no scratch.
Task<void> allgather_ring(Transport& net, ConstBytes mine, Bytes all, Partition blocks, TakePart take = {});

}  // namespace telegrad
