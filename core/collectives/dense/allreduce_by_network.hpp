#pragma once

#include "base/types.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// output = the reduction of all ranks' inputs by the network's own collective; mpi_reduces(dtype, reduction). Steps below
/// 2 · 32 and those of a broadcast behind them.
Task<void> allreduce_by_network(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Bytes output);

}  // namespace telegrad
