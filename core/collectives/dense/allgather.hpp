#pragma once

#include <functional>

#include "base/types.hpp"
#include "collectives/support/partition.hpp"
#include "transport/task.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Called for each part of another rank's block once it is there, one call after the other; of a block the parts come in
/// order, and `part` says where in all blocks.
using TakePart = std::function<Task<void>(Rank owner, Range part)>;

/// Every rank's `mine` in the order of ranks, whose lengths in bytes are `blocks`, the same on all ranks. `mine` may be
/// this rank's own block of `all`. Short blocks go by Bruck's algorithm, long ones round a ring. `all` is written only
/// once every rank has called. `take`, if given, is called beside what still travels.
Task<void> allgather(Transport& net, ConstBytes mine, Bytes all, Partition blocks, TakePart take = {});

}  // namespace telegrad
