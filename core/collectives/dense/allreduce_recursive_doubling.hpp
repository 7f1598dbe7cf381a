#pragma once

#include <cstddef>

#include "base/types.hpp"
#include "collectives/support/lanes.hpp"
#include "collectives/support/pieces.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Shorter messages than a ring's: both ranks of a pair send at once, and long ones get in each other's way. Every rank
/// sends every segment log2 P times.
inline constexpr LaneTuning kDoublingTuning{.message_bytes = kCardBytes, .segments_most = 300};

/// output = the sum (or mean) of all ranks' inputs, the same bits on every rank. `input` and `output` have the same
/// length on all ranks; they are the same memory or do not overlap. Sends and receives n·log2 P bytes per rank; where P
/// is not a power of two, n·(floor(log2 P) + 1) at most. Holds scratch of at most 2·lanes messages, or of 3n if P
/// is not a power of two. `output` is written only where this rank has heard from every other.
Task<void> allreduce_recursive_doubling(Transport& net, DType dtype, Reduction reduction, ConstBytes input,
                                        Bytes output, LaneTuning tuning = kDoublingTuning);

}  // namespace telegrad
