#pragma once

#include "collectives/support/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Block r of `input` to rank r, and into `output` the blocks that the ranks have for this one, in their order. All blocks
/// have the same length, on all ranks. `input` and `output` do not overlap. Short blocks of many ranks go by Bruck's
/// algorithm, others directly. `output` is written only once every rank has called.
Task<void> all_to_all(Transport& net, ConstBytes input, Bytes output);

/// The same where lengths (in bytes) differ: each rank knows what it sends and what it gets. A message that is not as long
/// as its receiver says ends the operation.
Task<void> all_to_all_v(Transport& net, ConstBytes input, Bytes output, Partition sent, Partition received);

/// all_to_all() of blocks into scratch, where no block of this rank's own is looked at, and nobody needs to have heard from
/// all ranks: an equally long one to each other rank. Uses kExchangeBlocksSteps steps from `first_step` on.
Task<void> exchange_blocks(Transport& net, ConstBytes input, Bytes output, Step first_step);
inline constexpr Step kExchangeBlocksSteps = Step{1} << 14;

}  // namespace telegrad
