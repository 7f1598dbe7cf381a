#pragma once

#include "base/types.hpp"
#include "collectives/support/input_maker.hpp"
#include "transport/envelope.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// output = the reduction of all ranks' inputs by an algorithm of kAllreduceAlgorithms (CHECKed); see their own headers. `maker`: in
/// place of an input, which is then not read; all but the ring let it make all of that first, in `output`.
Task<void> allreduce(Transport& net, Algorithm algorithm, DType dtype, Reduction reduction, ConstBytes input,
                     Bytes output, InputMaker* maker = nullptr);

}  // namespace telegrad
