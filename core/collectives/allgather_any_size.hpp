#pragma once

#include <functional>
#include <span>

#include "collectives/kept_messages.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// A message that has come, and from whom.
struct Arrived {
  Rank source = 0;
  ConstBytes bytes;
};

/// Every rank's message, round a ring, where each rank alone knows how long its own is: up to `most_bytes`, which all
/// ranks agree on. `take`, if any, runs once for each message, this rank's first, in batches worth a turn of the network, while
/// others come. Uses steps from `first_step` on, as many as P − 1 messages have (any_size_steps()).
Task<KeptMessages> allgather_any_size(Transport& net, Buffer mine, std::size_t most_bytes, Step first_step,
                                      std::function<Task<void>(std::span<const Arrived>)> take);

}  // namespace telegrad
