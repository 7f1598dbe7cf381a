#pragma once

#include "transport/transport.hpp"

namespace telegrad {

/// `data` of rank `root` to every rank; all pass the same length. Each rank but the root receives n bytes once. Short
/// vectors go down a binomial tree, in which the root sends n·ceil(log2 P) bytes, long ones along a chain.
Task<void> broadcast(Transport& net, Rank root, Bytes data);

}  // namespace telegrad
