#include "session/reductions.hpp"

#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "base/check.hpp"
#include "codec/counted.hpp"
#include "collectives/dense/allreduce.hpp"
#include "collectives/dense/allreduce_by_network.hpp"
#include "collectives/dense/allreduce_two_level.hpp"
#include "collectives/dense/barrier.hpp"
#include "collectives/dense/reduce.hpp"
#include "collectives/dense/reduce_in_order.hpp"
#include "collectives/dense/reduce_scatter.hpp"
#include "collectives/sparse/auto.hpp"
#include "collectives/sparse/reduce_scatter.hpp"
#include "collectives/support/elements.hpp"

namespace telegrad {
namespace {

RequestPtr request(const Call& call, Request::Body body) { return std::make_shared<Request>(call, std::move(body)); }

// A rank that is alone combines nothing, but its booleans and logical results are 0 and 1 as among several.
bool normalises_alone(const Transport& net, const Dense& dense) {
  return net.size() == 1 && gives_truth(dense.dtype, dense.reduction);
}
Task<void> normalise(Transport& net, const Dense& dense) {
  return reduce_to(net, dense.dtype, Reduction::land, dense.input, dense.input, dense.output);
}

bool on_two_levels(const std::shared_ptr<const Nodes>& nodes) { return nodes != nullptr && nodes->two_level(); }

Call custom_call(Operation operation, const Dense& dense, Rank root = kNoRank) {
  TELEGRAD_CHECK(dense.algorithm == Algorithm::automatic && dense.input.size() % dense.given->element == 0);
  return {.operation = operation,
          .dtype = dense.dtype,
          .reduction = kCustomReduction,
          .root = root,
          .count = dense.input.size() / dense.given->element,
          .layout = dense.given->digest};
}

void check_mpi_reduces(const AllreduceTable& table, const Dense& dense, bool by_network) {
  if (!table.has_network_sums()) {
    throw std::invalid_argument(
        "algorithm=mpi needs MPI's own collectives, which this communicator does not have: give algorithm=auto, or join "
        "by driver=mpi, one communicator at a time for each of MPI's, and no part of a split");
  }
  if (by_network) return;
  throw std::invalid_argument(std::string("algorithm=mpi has no ") + name_of(dense.reduction) + " of " +
                              name_of(dense.dtype) + (dense.gated ? " of a stream" : "") +
                              " with telegrad's bits: give algorithm=auto");
}

template <class V>
void flip_given_signs(SparseVector<V>& vector, const SparseReduction& how) {
  if constexpr (std::is_integral_v<V>) {
    if (how.flips_signs()) flip_signs(vector.own_values());
  }
}
template <class V>
Task<void> flip_signs_back(Transport& net, std::span<V> values) {
  co_await compute_slices(net, values.size(), sizeof(V), [values](std::size_t begin, std::size_t end) {
    flip_signs(values.subspan(begin, end - begin));
  });
}

// Formats of indices may differ: every message says which it has.
template <class V>
Call sparse_call(std::uint64_t dimension, const SparseReduction& how) {
  return {.operation = Operation::sparse_allreduce,
          .dtype = how.dtype<V>(),
          .reduction = how.reduction,
          .algorithm = how.algorithm,
          .count = dimension,
          .switch_factor = how.switch_factor,
          .layout = how.nodes                        ? how.nodes->digest()
                    : how.slices == Slices::balanced ? kBalancedSlices
                                                     : 0,
          .wire = how.wire.values,
          .reserved = {static_cast<std::uint8_t>(how.rounds_shares ? 0 : 1)}};
}

template <class V>
Call slices_call(std::uint64_t dimension, const Partition& slices, const SparseReduction& how) {
  TELEGRAD_CHECK(slices.count() == dimension);
  Call call = sparse_call<V>(dimension, how);
  call.operation = Operation::sparse_reduce_scatter;
  call.algorithm = Algorithm::automatic;
  call.layout = slices.digest();
  return call;
}

template <class V>
Call gather_call(std::uint64_t dimension, const SparseReduction& how) {
  return {.operation = Operation::sparse_allgather,
          .dtype = how.dtype<V>(),
          .count = dimension,
          .wire = how.wire.values};
}

template <class V>
Task<void> sum_vectors(Transport& net, SparseVector<V> mine, SparseReduction how,
                       std::shared_ptr<std::optional<SparseVector<V>>> result) {
  how.wire.key.rank = net.rank();
  if (how.observation) co_await how.observation->begin(net.ready());
  result->emplace(co_await allreduce_sparse(net, std::move(mine), how));
  if constexpr (std::is_integral_v<V>) {
    if (how.flips_signs()) co_await flip_signs_back(net, (*result)->own_values());
  }
  if (how.observation) how.observation->end();
}

template <class V>
Task<void> sum_vectors_into(Transport& net, SparseVector<V> mine, SparseReduction how, std::span<V> output) {
  how.wire.key.rank = net.rank();
  if (how.observation) co_await how.observation->begin(net.ready());
  co_await allreduce_sparse_into(net, std::move(mine), how, output);
  if constexpr (std::is_integral_v<V>) {
    if (how.flips_signs()) co_await flip_signs_back(net, output);
  }
  if (how.observation) how.observation->end();
}

template <class V>
Task<void> reduce_own_slice(Transport& net, SparseVector<V> mine, Partition slices, SparseReduction how,
                            std::shared_ptr<std::optional<SparseVector<V>>> result) {
  how.wire.key.rank = net.rank();
  result->emplace(co_await reduce_scatter_sparse(net, std::move(mine), std::move(slices), how));
  if constexpr (std::is_integral_v<V>) {
    if (how.flips_signs()) co_await flip_signs_back(net, (*result)->own_values());
  }
}

// What a rank calls with state and settings of this kind.
template <class V>
Task<OkTopkSum<V>> allreduce_topk(Transport& net, SparseVector<V> mine, OkTopkSettings settings, OkTopkState state,
                                  Reduction reduction, WireFormat wire, std::span<float> residual) {
  wire.key.rank = net.rank();
  return allreduce_oktopk(net, std::move(mine), settings, std::move(state), reduction, wire, residual);
}
template <class V>
Task<GTopkSum<V>> allreduce_topk(Transport& net, SparseVector<V> mine, GTopkSettings settings, GTopkState state,
                                 Reduction reduction, WireFormat wire, std::span<float>) {
  return allreduce_gtopk(net, std::move(mine), settings, state, reduction, wire);
}
template <class V>
Task<BoundedTopkSum<V>> allreduce_topk(Transport& net, SparseVector<V> mine, BoundedTopkSettings settings,
                                       BoundedTopkState state, Reduction reduction, WireFormat wire,
                                       std::span<float>) {
  return allreduce_bounded_topk(net, std::move(mine), settings, std::move(state), reduction, wire);
}

template <class V, class Settings, class State>
Task<void> sum_largest(Transport& net, SparseVector<V> mine, Settings settings, State state, Reduction reduction,
                       WireFormat wire, std::span<float> residual,
                       std::shared_ptr<std::optional<TopkResult<V, State>>> result) {
  result->emplace(co_await allreduce_topk(net, std::move(mine), settings, std::move(state), reduction, wire, residual));
  (*result)->report.bytes = net.moved();
}

template <class V, class Settings, class State>
Task<void> sum_largest_staged(Transport& net, StagedEntries<V> mine, StagedSum<V> sum, StagedSum<float> lost,
                              Settings settings, State state, Reduction reduction, WireFormat wire,
                              std::shared_ptr<std::optional<TopkResult<V, State>>> result) {
  co_await clear_lost(net, lost);
  SparseVector<V> vector = co_await read_staged(net, mine);
  const std::span<float> residual = wire.values == ValueEncoding::native ? std::span<float>{} : lost.dense;
  co_await sum_largest(net, std::move(vector), settings, std::move(state), reduction, wire, residual, result);
  co_await write_lost(net, (*result)->left, lost);
  co_await write_staged(net, (*result)->sum, sum, reduction);
}

template <class V, class Settings, class State>
Call topk_call(std::uint64_t dimension, const Settings& settings, const State& state, Reduction reduction,
               const WireFormat& wire) {
  constexpr Algorithm algorithm = std::is_same_v<State, OkTopkState>  ? Algorithm::oktopk
                                  : std::is_same_v<State, GTopkState> ? Algorithm::gtopk
                                                                      : Algorithm::bounded;
  return {.operation = Operation::allreduce_topk,
          .dtype = dtype_of<V>,
          .reduction = reduction,
          .algorithm = algorithm,
          .count = dimension,
          .layout = state.digest(settings),
          .wire = wire.values};
}

template <class V, class Settings, class State>
TopkSum<V, State> topk_sum(SparseVector<V> vector, const Settings& settings, const State& state, Reduction reduction,
                           WireFormat wire, std::span<float> residual) {
  const Call call = topk_call<V>(vector.dimension(), settings, state, reduction, wire);
  auto result = std::make_shared<std::optional<TopkResult<V, State>>>();
  auto mine = std::make_shared<SparseVector<V>>(std::move(vector));
  return {request(call,
                  [=](Transport& net) {
                    return sum_largest(net, std::move(*mine), settings, state, reduction, wire, residual, result);
                  }),
          result};
}

Call quantised_call(const QuantisedSum& how, std::size_t count) {
  return {.operation = Operation::allreduce,
          .dtype = DType::f32,
          .reduction = how.reduction,
          .algorithm = Algorithm::split_allgather,
          .count = count,
          .wire = how.encoding};
}

}  // namespace

RequestPtr make_all_reduce(const AllreduceTable& table, const Dense& dense) {
  if (dense.given) {
    return request(custom_call(Operation::allreduce, dense), [dense](Transport& net) {
      return allreduce_in_order(net, *dense.given, dense.input, dense.output);
    });
  }
  const bool by_network = !dense.gated && mpi_reduces(dense.dtype, dense.reduction);
  if (dense.algorithm == Algorithm::mpi) check_mpi_reduces(table, dense, by_network);
  const std::size_t bytes = dense.input.size();
  Algorithm algorithm = dense.algorithm == Algorithm::automatic ? table.choose(bytes, by_network) : dense.algorithm;
  if (algorithm == Algorithm::two_level && !on_two_levels(dense.nodes)) algorithm = table.choose_flat(bytes, by_network);
  const Call call{.operation = Operation::allreduce,
                  .dtype = dense.dtype,
                  .reduction = dense.reduction,
                  .algorithm = algorithm,
                  .count = dense.input.size() / size_of(dense.dtype),
                  .layout = algorithm == Algorithm::two_level ? dense.nodes->digest() : 0};
  return request(call, [dense, algorithm](Transport& net) {
    if (normalises_alone(net, dense)) return normalise(net, dense);
    if (algorithm == Algorithm::two_level) {
      return allreduce_two_level(net, *dense.nodes, dense.dtype, dense.reduction, dense.input, dense.output);
    }
    if (algorithm == Algorithm::mpi) {
      return allreduce_by_network(net, dense.dtype, dense.reduction, dense.input, dense.output);
    }
    return allreduce(net, algorithm, dense.dtype, dense.reduction, dense.input, dense.output);
  });
}

RequestPtr make_announced_all_reduce(DType dtype, Reduction reduction, std::uint64_t count) {
  const Call call{.operation = Operation::allreduce,
                  .dtype = dtype,
                  .reduction = reduction,
                  .algorithm = Algorithm::nccl,
                  .count = count};
  return request(call, [](Transport& net) { return barrier(net); });
}

RequestPtr make_all_reduce_quantised(const Dense& dense, QuantisedSum how, Bytes error) {
  TELEGRAD_CHECK(dense.dtype == DType::f32 && dense.algorithm == Algorithm::automatic);
  how.reduction = dense.reduction;
  const Call call = quantised_call(how, dense.input.size() / size_of(dense.dtype));
  return request(call, [dense, how, error, count = static_cast<std::size_t>(call.count)](Transport& net) {
    return allreduce_quantised(net, how, {reinterpret_cast<const float*>(dense.input.data()), count},
                               {reinterpret_cast<float*>(dense.output.data()), count},
                               {reinterpret_cast<float*>(error.data()), error.size() / sizeof(float)});
  });
}

RequestPtr make_all_reduce_encoded(QuantisedSum how, const EncodedVectors& vectors) {
  return request(quantised_call(how, vectors.count),
                 [how, vectors](Transport& net) { return allreduce_encoded(net, how, vectors); });
}

RequestPtr make_reduce(Rank size, const Dense& dense, Rank root) {
  TELEGRAD_CHECK(root < size && dense.algorithm == Algorithm::automatic);
  if (dense.given) {
    return request(custom_call(Operation::reduce, dense, root), [dense, root](Transport& net) {
      return reduce_in_order(net, *dense.given, root, dense.input, dense.output);
    });
  }
  const Call call{.operation = Operation::reduce,
                  .dtype = dense.dtype,
                  .reduction = dense.reduction,
                  .root = root,
                  .count = dense.input.size() / size_of(dense.dtype)};
  return request(call, [dense, root](Transport& net) {
    if (normalises_alone(net, dense)) return normalise(net, dense);
    return reduce_to_root(net, root, dense.dtype, dense.reduction, dense.input, dense.output);
  });
}

RequestPtr make_reduce_scatter(const Dense& dense, Partition partition) {
  TELEGRAD_CHECK(dense.algorithm == Algorithm::automatic);
  if (dense.given) {
    Call call = custom_call(Operation::reduce_scatter, dense);
    call.layout ^= partition.digest();
    return request(call, [dense, partition = std::move(partition)](Transport& net) {
      return reduce_scatter_in_order(net, *dense.given, dense.input, partition, dense.output);
    });
  }
  const Call call{.operation = Operation::reduce_scatter,
                  .dtype = dense.dtype,
                  .reduction = dense.reduction,
                  .count = partition.count(),
                  .layout = partition.digest()};
  return request(call, [dense, partition = std::move(partition)](Transport& net) {
    if (normalises_alone(net, dense)) return normalise(net, dense);
    return reduce_scatter(net, dense.dtype, dense.reduction, dense.input, partition, dense.output);
  });
}

template <class V>
SparseSum<V> make_all_reduce(SparseVector<V> vector, const SparseReduction& wished) {
  const SparseReduction how = settings_of_call<V>(wished, vector.dimension());
  const Call call = sparse_call<V>(vector.dimension(), how);
  flip_given_signs(vector, how);
  auto result = std::make_shared<std::optional<SparseVector<V>>>();
  auto mine = std::make_shared<SparseVector<V>>(std::move(vector));
  return {request(call, [=](Transport& net) { return sum_vectors(net, std::move(*mine), how, result); }), result};
}

template <class V>
RequestPtr make_all_reduce_into(SparseVector<V> vector, std::span<V> output, const SparseReduction& wished) {
  const SparseReduction how = settings_of_call<V>(wished, vector.dimension());
  const Call call = sparse_call<V>(vector.dimension(), how);
  flip_given_signs(vector, how);
  auto mine = std::make_shared<SparseVector<V>>(std::move(vector));
  return request(call, [=](Transport& net) { return sum_vectors_into(net, std::move(*mine), how, output); });
}

template <class V>
RequestPtr make_all_reduce_staged(const StagedEntries<V>& mine, const StagedSum<V>& sum,
                                  const SparseReduction& wished, const StagedSum<float>& lost) {
  const SparseReduction how = settings_of_call<V>(wished, mine.dimension);
  return request(sparse_call<V>(mine.dimension, how),
                 [=](Transport& net) { return allreduce_staged(net, mine, how, sum, lost); });
}

template <class V>
RequestPtr make_reduce_scatter_staged(const StagedEntries<V>& mine, Partition slices, const StagedSum<V>& sum,
                                      const SparseReduction& how, const StagedSum<float>& lost) {
  const Call call = slices_call<V>(mine.dimension, slices, how);
  return request(call, [=, slices = std::move(slices)](Transport& net) {
    return reduce_scatter_staged(net, mine, slices, how, sum, lost);
  });
}

template <class V>
RequestPtr make_all_gather_staged(const StagedEntries<V>& mine, const StagedSum<V>& all, const SparseReduction& how,
                                  const StagedSum<float>& lost) {
  return request(gather_call<V>(mine.dimension, how),
                 [=](Transport& net) { return allgather_staged(net, mine, how, all, lost); });
}

template <class V>
SparseSum<V> make_reduce_scatter(SparseVector<V> vector, Partition slices, const SparseReduction& how) {
  const Call call = slices_call<V>(vector.dimension(), slices, how);
  flip_given_signs(vector, how);
  auto result = std::make_shared<std::optional<SparseVector<V>>>();
  auto mine = std::make_shared<SparseVector<V>>(std::move(vector));
  return {request(call,
                  [=, slices = std::move(slices)](Transport& net) {
                    return reduce_own_slice(net, std::move(*mine), slices, how, result);
                  }),
          result};
}

template <class V>
TopkSum<V, OkTopkState> make_all_reduce_topk(SparseVector<V> vector, const OkTopkSettings& settings,
                                             const OkTopkState& state, Reduction reduction, WireFormat wire,
                                             std::span<float> residual) {
  return topk_sum(std::move(vector), settings, state, reduction, wire, residual);
}
template <class V>
TopkSum<V, GTopkState> make_all_reduce_topk(SparseVector<V> vector, const GTopkSettings& settings,
                                            const GTopkState& state, Reduction reduction, WireFormat wire,
                                            std::span<float> residual) {
  return topk_sum(std::move(vector), settings, state, reduction, wire, residual);
}
template <class V>
TopkSum<V, BoundedTopkState> make_all_reduce_topk(SparseVector<V> vector, const BoundedTopkSettings& settings,
                                                  const BoundedTopkState& state, Reduction reduction, WireFormat wire,
                                                  std::span<float> residual) {
  return topk_sum(std::move(vector), settings, state, reduction, wire, residual);
}

template <class V, class Settings, class State>
TopkSum<V, State> make_all_reduce_topk_staged(const StagedEntries<V>& mine, const StagedSum<V>& sum,
                                              const StagedSum<float>& lost, const Settings& settings, const State& state,
                                              Reduction reduction, WireFormat wire) {
  auto result = std::make_shared<std::optional<TopkResult<V, State>>>();
  return {request(topk_call<V>(mine.dimension, settings, state, reduction, wire),
                  [=](Transport& net) {
                    return sum_largest_staged(net, mine, sum, lost, settings, state, reduction, wire, result);
                  }),
          result};
}

template <class V>
RequestPtr make_average_gathered_staged(const StagedEntries<V>& mine, const StagedSum<V>& average,
                                        const SparseReduction& how, const StagedSum<float>& lost) {
  return request(gather_call<V>(mine.dimension, how),
                 [=](Transport& net) { return average_gathered_staged(net, mine, how, average, lost); });
}

#define TELEGRAD_INSTANTIATE_TOPK(V, Kind)                                                                     \
  template TopkSum<V, Kind##State> make_all_reduce_topk(SparseVector<V>, const Kind##Settings&, const Kind##State&, \
                                                        Reduction, WireFormat, std::span<float>);              \
  template TopkSum<V, Kind##State> make_all_reduce_topk_staged(                                                \
      const StagedEntries<V>&, const StagedSum<V>&, const StagedSum<float>&, const Kind##Settings&,            \
      const Kind##State&, Reduction, WireFormat);
#define TELEGRAD_INSTANTIATE(V)                                                                    \
  template SparseSum<V> make_all_reduce(SparseVector<V>, const SparseReduction&);                  \
  template RequestPtr make_all_reduce_into(SparseVector<V>, std::span<V>, const SparseReduction&); \
  template SparseSum<V> make_reduce_scatter(SparseVector<V>, Partition, const SparseReduction&);   \
  template RequestPtr make_all_reduce_staged(const StagedEntries<V>&, const StagedSum<V>&,         \
                                             const SparseReduction&, const StagedSum<float>&);     \
  template RequestPtr make_reduce_scatter_staged(const StagedEntries<V>&, Partition, const StagedSum<V>&, \
                                                 const SparseReduction&, const StagedSum<float>&); \
  template RequestPtr make_all_gather_staged(const StagedEntries<V>&, const StagedSum<V>&,         \
                                             const SparseReduction&, const StagedSum<float>&);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE
#define TELEGRAD_INSTANTIATE(V)                                                                    \
  template RequestPtr make_average_gathered_staged(const StagedEntries<V>&, const StagedSum<V>&,   \
                                                   const SparseReduction&, const StagedSum<float>&); \
  TELEGRAD_INSTANTIATE_TOPK(V, OkTopk)                                                             \
  TELEGRAD_INSTANTIATE_TOPK(V, GTopk)                                                              \
  TELEGRAD_INSTANTIATE_TOPK(V, BoundedTopk)
TELEGRAD_FOR_FLOAT_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE
#undef TELEGRAD_INSTANTIATE_TOPK
template SparseSum<CountedF32> make_all_reduce(SparseVector<CountedF32>, const SparseReduction&);
template SparseSum<CountedF32> make_reduce_scatter(SparseVector<CountedF32>, Partition, const SparseReduction&);

}  // namespace telegrad
