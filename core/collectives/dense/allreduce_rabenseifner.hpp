#pragma once

#include "base/types.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// output = the sum (or mean) of all ranks' inputs, the same bits on every rank. `input` and `output` have the same
/// length on all ranks; they are the same memory or do not overlap. Sends and receives 2(P−1)/P·n bytes per rank in
/// 2·ceil(log2 P) rounds, whatever P, and holds scratch of 3/4·n; where goes_directly() says so, in two rounds of P − 1
/// messages, with scratch of (P−1)/P·n. `output` is written once this rank has heard from every other.
Task<void> allreduce_rabenseifner(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Bytes output);

}  // namespace telegrad
