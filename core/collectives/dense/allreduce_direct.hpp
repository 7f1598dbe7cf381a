#pragma once

#include <cstddef>

#include "base/types.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Where every block goes straight to its owner, and its sum straight to all, in less time than by halving and doubling.
bool goes_directly(const Transport& net, std::size_t bytes);

/// output = input, reduced over all ranks; `output` may be `input`. P > 1. Two rounds of P − 1 messages, 2(P−1)/P·n bytes sent
/// and received; holds scratch of (P−1)/P·n. Uses two steps.
Task<void> allreduce_direct(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Bytes output);

}  // namespace telegrad
