#pragma once

#include "collectives/support/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Every rank's `mine` to rank `root`, in the order of ranks in `all`, whose lengths in bytes are `blocks`, the same on all
/// ranks. `all` is looked at on the root only; `mine` may be the root's own block of it there. Short blocks of many ranks
/// go up a binomial tree, others directly.
Task<void> gather(Transport& net, Rank root, ConstBytes mine, Bytes all, Partition blocks);

}  // namespace telegrad
