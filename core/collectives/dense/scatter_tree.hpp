#pragma once

#include "transport/transport.hpp"

namespace telegrad {

/// scatter() of equally long short blocks: ceil(log2 P) steps, and scratch for the blocks that a rank passes on.
Task<void> scatter_tree(Transport& net, Rank root, ConstBytes all, Bytes mine);

}  // namespace telegrad
