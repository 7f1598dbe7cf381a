#include "session/moves.hpp"

#include <memory>
#include <utility>

#include "base/check.hpp"
#include "codec/counted.hpp"
#include "collectives/dense/all_to_all.hpp"
#include "collectives/dense/allgather.hpp"
#include "collectives/dense/barrier.hpp"
#include "collectives/dense/broadcast.hpp"
#include "collectives/dense/gather.hpp"
#include "collectives/dense/scatter.hpp"
#include "collectives/sparse/allgather.hpp"

namespace telegrad {
namespace {

// Of a block where all are equal, of all together where they are not.
std::uint64_t count_of(const Partition& blocks, DType dtype) {
  return (blocks.alike() ? blocks[0].size() : blocks.count()) / size_of(dtype);
}

template <class V>
Task<void> gather_vectors(Transport& net, SparseVector<V> mine, SparseReduction how,
                          std::shared_ptr<std::optional<std::vector<SparseVector<V>>>> result) {
  how.wire.key.rank = net.rank();
  result->emplace(co_await allgather_sparse(net, std::move(mine), how));
}

}  // namespace

RequestPtr make_all_gather(DType dtype, ConstBytes mine, Bytes all, const Partition& blocks) {
  TELEGRAD_CHECK(all.size() == blocks.count());
  const Call call{.operation = Operation::allgather,
                  .dtype = dtype,
                  .count = count_of(blocks, dtype),
                  .layout = blocks.digest()};
  return std::make_shared<Request>(call, [=](Transport& net) { return allgather(net, mine, all, blocks); });
}

RequestPtr make_gather(DType dtype, ConstBytes mine, Bytes all, const Partition& blocks, Rank root) {
  TELEGRAD_CHECK(root < blocks.blocks());
  const Call call{.operation = Operation::gather,
                  .dtype = dtype,
                  .root = root,
                  .count = count_of(blocks, dtype),
                  .layout = blocks.digest()};
  return std::make_shared<Request>(call, [=](Transport& net) { return gather(net, root, mine, all, blocks); });
}

RequestPtr make_scatter(DType dtype, ConstBytes all, Bytes mine, const Partition& blocks, Rank root) {
  TELEGRAD_CHECK(root < blocks.blocks());
  const Call call{.operation = Operation::scatter,
                  .dtype = dtype,
                  .root = root,
                  .count = count_of(blocks, dtype),
                  .layout = blocks.digest()};
  return std::make_shared<Request>(call, [=](Transport& net) { return scatter(net, root, all, mine, blocks); });
}

RequestPtr make_all_to_all(Rank size, DType dtype, ConstBytes input, Bytes output) {
  TELEGRAD_CHECK(input.size() == output.size() && input.size() % size == 0);
  const Call call{
      .operation = Operation::all_to_all, .dtype = dtype, .count = input.size() / size / size_of(dtype)};
  return std::make_shared<Request>(call, [=](Transport& net) { return all_to_all(net, input, output); });
}

RequestPtr make_all_to_all_v(DType dtype, ConstBytes input, Bytes output, const Partition& sent,
                             const Partition& received) {
  TELEGRAD_CHECK(input.size() == sent.count() && output.size() == received.count());
  // Its ranks compare no lengths: theirs differ. So it must not meet an all_to_all of equal blocks.
  const Call call{.operation = Operation::all_to_all, .dtype = dtype, .layout = kOwnCounts};
  return std::make_shared<Request>(call,
                                   [=](Transport& net) { return all_to_all_v(net, input, output, sent, received); });
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

template <class V>
GatheredVectors<V> make_all_gather(SparseVector<V> vector, const SparseReduction& how) {
  const Call call{.operation = Operation::sparse_allgather,
                  .dtype = how.dtype<V>(),
                  .count = vector.dimension(),
                  .wire = how.wire.values};
  auto result = std::make_shared<std::optional<std::vector<SparseVector<V>>>>();
  auto mine = std::make_shared<SparseVector<V>>(std::move(vector));
  return {std::make_shared<Request>(
              call, [=](Transport& net) { return gather_vectors(net, std::move(*mine), how, result); }),
          result};
}

#define TELEGRAD_INSTANTIATE(V) template GatheredVectors<V> make_all_gather(SparseVector<V>, const SparseReduction&);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
