#pragma once

#include "base/buffer.hpp"
#include "collectives/partition.hpp"
#include "collectives/kept_messages.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Every rank's `mine` in the order of ranks, whose lengths in bytes are `blocks`, the same on all ranks. `mine` may be
/// this rank's own block of `all`. Short blocks go by Bruck's algorithm, long ones round a ring. `all` is written only
/// once every rank has called.
Task<void> allgather(Transport& net, ConstBytes mine, Bytes all, Partition blocks);

/// Every rank's block, round a ring, where each rank alone knows how long its own is: up to `most_bytes`, which all
/// ranks agree on. Uses steps [first_step, first_step + P − 1).
Task<KeptMessages> allgather_any_size(Transport& net, Buffer mine, std::size_t most_bytes, Step first_step = 0);

}  // namespace telegrad
