#pragma once

#include "collectives/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// allgather() for short blocks: few messages, and scratch as long as `all`. Uses steps [0, 32).
Task<void> allgather_bruck(Transport& net, ConstBytes mine, Bytes all, Partition blocks);

}  // namespace telegrad
