#pragma once

#include "transport/transport.hpp"

namespace telegrad {

/// True where the chain is the faster way, as far as one can tell from what all ranks know alike.
bool broadcast_goes_by_chain(Rank size, bool shares_memory, std::size_t bytes);
/// broadcast() for long vectors: each rank but the last sends n bytes once.
Task<void> broadcast_chain(Transport& net, Rank root, Bytes data);

}  // namespace telegrad
