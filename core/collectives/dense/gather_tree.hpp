#pragma once

#include "transport/transport.hpp"

namespace telegrad {

/// gather() of equally long short blocks: ceil(log2 P) steps, and scratch for the blocks that a rank passes on.
Task<void> gather_tree(Transport& net, Rank root, ConstBytes mine, Bytes all);

}  // namespace telegrad
