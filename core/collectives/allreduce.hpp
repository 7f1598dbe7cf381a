#pragma once

#include "base/types.hpp"
#include "transport/envelope.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// output = the reduction of all ranks' inputs by an algorithm of kAllreduceAlgorithms (CHECKed); see their own headers.
Task<void> allreduce(Transport& net, Algorithm algorithm, DType dtype, Reduction reduction, ConstBytes input,
                     Bytes output);

}  // namespace telegrad
