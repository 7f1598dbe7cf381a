#pragma once

#include <cstddef>

#include "base/types.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// How a long vector is cut so that receiving, adding and sending overlap. All ranks use the same.
struct RingTuning {
  /// A vector is cut into segments such that messages are about this long at most.
  std::size_t message_bytes = std::size_t{256} << 10;
  /// How many segments are on their way at once.
  std::size_t lanes = 2;
};

/// output = the sum (or mean) of all ranks' inputs, the same bits on every rank. `input` and `output` have the same
/// length on all ranks; they are the same memory or do not overlap. Sends and receives 2(P−1)/P·n bytes per rank; holds
/// scratch of at most 2·lanes messages. `output` is written only where this rank has heard from every other.
Task<void> allreduce_ring(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Bytes output,
                          RingTuning tuning = {});

}  // namespace telegrad
