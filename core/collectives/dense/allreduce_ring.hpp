#pragma once

#include "base/types.hpp"
#include "collectives/support/ring.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// output = the sum (or mean) of all ranks' inputs, the same bits on every rank. `input` and `output` have the same
/// length on all ranks; they are the same memory or do not overlap. Sends and receives 2(P−1)/P·n bytes per rank; holds
/// scratch of at most 2·lanes messages. `output` is written only where this rank has heard from every other. `maker`: in
/// place of an input, which is then not read.
Task<void> allreduce_ring(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Bytes output,
                          LaneTuning tuning = {}, InputMaker* maker = nullptr);

}  // namespace telegrad
