#pragma once

#include "collectives/support/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// allgather() for short blocks: few messages, and scratch as long as `all`. Uses 32 steps from `first_step` on.
Task<void> allgather_bruck(Transport& net, ConstBytes mine, Bytes all, Partition blocks, Step first_step = 0);

}  // namespace telegrad
