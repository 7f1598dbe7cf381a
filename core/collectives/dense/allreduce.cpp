#include "collectives/dense/allreduce.hpp"

#include <utility>

#include "base/check.hpp"
#include "collectives/dense/allreduce_rabenseifner.hpp"
#include "collectives/dense/allreduce_recursive_doubling.hpp"
#include "collectives/dense/allreduce_ring.hpp"

namespace telegrad {

namespace {

Task<void> made_first(InputMaker& maker, Range all, Bytes output, Task<void> sum) {
  co_await maker.make(all, output);
  co_await std::move(sum);
}

}  // namespace

Task<void> allreduce(Transport& net, Algorithm algorithm, DType dtype, Reduction reduction, ConstBytes input,
                     Bytes output, InputMaker* maker) {
  if (maker != nullptr && algorithm != Algorithm::ring) {
    return made_first(*maker, {0, output.size() / size_of(dtype)}, output,
                      allreduce(net, algorithm, dtype, reduction, output, output));
  }
  switch (algorithm) {
    case Algorithm::ring: return allreduce_ring(net, dtype, reduction, input, output, {}, maker);
    case Algorithm::rabenseifner: return allreduce_rabenseifner(net, dtype, reduction, input, output);
    default: break;
  }
  TELEGRAD_CHECK(algorithm == Algorithm::recursive_doubling);
  return allreduce_recursive_doubling(net, dtype, reduction, input, output);
}

}  // namespace telegrad
