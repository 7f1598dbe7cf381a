#pragma once

#include "base/buffer.hpp"
#include "collectives/kept_messages.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Every rank's `mine` in the order of ranks: all.size() = P·mine.size(), the same on all ranks. `mine` may be this
/// rank's own block of `all`. Each rank sends and receives (P−1)·n bytes. `all` is written only once every rank has
/// called. Uses steps [0, P + 32).
Task<void> allgather(Transport& net, ConstBytes mine, Bytes all);

/// The same where each rank alone knows how long its block is: up to `most_bytes`, which all ranks agree on.
/// Uses steps [first_step, first_step + P − 1).
Task<KeptMessages> allgather_any_size(Transport& net, Buffer mine, std::size_t most_bytes, Step first_step = 0);

}  // namespace telegrad
