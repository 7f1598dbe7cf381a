#pragma once

#include "base/types.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// output = the sum (or mean) of all ranks' inputs, the same bits on every rank. `input` and `output` have the same
/// length on all ranks; they are the same memory or do not overlap. Sends and receives n·log2 P bytes per rank; where P
/// is not a power of two, n·(floor(log2 P) + 1) at most. Holds scratch of 2n. `output` is written once this rank has
/// heard from every other.
Task<void> allreduce_recursive_doubling(Transport& net, DType dtype, Reduction reduction, ConstBytes input,
                                        Bytes output);

}  // namespace telegrad
