#pragma once

#include "collectives/support/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Block r of rank `root`'s `all` to rank r's `mine`. Lengths in bytes are `blocks`, the same on all ranks. `all` is looked
/// at on the root only; `mine` may be the root's own block of it there. Short blocks of many ranks go down a binomial tree,
/// others directly.
Task<void> scatter(Transport& net, Rank root, ConstBytes all, Bytes mine, Partition blocks);

}  // namespace telegrad
