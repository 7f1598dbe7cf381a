#include "collectives/allreduce.hpp"

#include "base/check.hpp"
#include "collectives/allreduce_rabenseifner.hpp"
#include "collectives/allreduce_recursive_doubling.hpp"
#include "collectives/allreduce_ring.hpp"

namespace telegrad {

Task<void> allreduce(Transport& net, Algorithm algorithm, DType dtype, Reduction reduction, ConstBytes input,
                     Bytes output) {
  switch (algorithm) {
    case Algorithm::ring: return allreduce_ring(net, dtype, reduction, input, output);
    case Algorithm::rabenseifner: return allreduce_rabenseifner(net, dtype, reduction, input, output);
    default: break;
  }
  TELEGRAD_CHECK(algorithm == Algorithm::recursive_doubling);
  return allreduce_recursive_doubling(net, dtype, reduction, input, output);
}

}  // namespace telegrad
