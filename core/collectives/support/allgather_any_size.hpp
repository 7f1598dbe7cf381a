#pragma once

#include <functional>
#include <span>

#include "collectives/support/kept_messages.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// A message that has come, and from whom.
struct Arrived {
  Rank source = 0;
  ConstBytes bytes;
};

/// What is done with messages that have come, in batches worth a turn of the network, while others come.
struct Taking {
  /// Nothing, if there is none.
  std::function<Task<void>(std::span<const Arrived>)> take = nullptr;  // once for each message, this rank's own first
  std::function<bool()> ready = nullptr;  // before it says so, only what is left at the end is taken
};

/// Every rank's message, round a ring, where each rank alone knows how long its own is: up to `most_bytes`, which all
/// ranks agree on. Uses steps from `first_step` on, as many as P − 1 messages have (any_size_steps()).
Task<KeptMessages> allgather_any_size(Transport& net, Buffer mine, std::size_t most_bytes, Step first_step,
                                      Taking taking);

}  // namespace telegrad
