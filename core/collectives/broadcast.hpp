#pragma once

#include "transport/transport.hpp"

namespace telegrad {

/// `data` of rank `root` to every rank; all pass the same length. Each rank but the root receives n bytes once; the
/// root sends n·ceil(log2 P).
Task<void> broadcast(Transport& net, Rank root, Bytes data);

}  // namespace telegrad
