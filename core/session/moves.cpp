#include "session/moves.hpp"

#include <memory>

#include "base/check.hpp"
#include "collectives/allgather.hpp"
#include "collectives/barrier.hpp"
#include "collectives/broadcast.hpp"

namespace telegrad {

RequestPtr make_all_gather(Rank size, DType dtype, ConstBytes mine, Bytes all) {
  TELEGRAD_CHECK(all.size() == mine.size() * size);
  const Call call{.operation = Operation::allgather,
                  .dtype = dtype,
                  .algorithm = Algorithm::ring,
                  .count = mine.size() / size_of(dtype)};
  return std::make_shared<Request>(call, [=](Transport& net) { return allgather(net, mine, all); });
}

RequestPtr make_broadcast(Rank size, DType dtype, Bytes data, Rank root) {
  TELEGRAD_CHECK(root < size);
  const Call call{
      .operation = Operation::broadcast, .dtype = dtype, .root = root, .count = data.size() / size_of(dtype)};
  return std::make_shared<Request>(call, [=](Transport& net) { return broadcast(net, root, data); });
}

RequestPtr make_barrier() {
  return std::make_shared<Request>(Call{.operation = Operation::barrier},
                                   [](Transport& net) { return barrier(net); });
}

}  // namespace telegrad
