#pragma once
// From a call that reduces to the Request that runs it. It must not know what runs Requests: an engine in real time, or a
// simulation. Arguments have been checked by whoever offers this to users. `size`: the number of ranks.

#include <memory>
#include <optional>
#include <span>

#include "base/given_reduction.hpp"
#include "base/types.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/dense/allreduce_quantised.hpp"
#include "collectives/dense/choice.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/support/nodes.hpp"
#include "collectives/support/partition.hpp"
#include "collectives/topk/bounded.hpp"
#include "collectives/topk/gtopk.hpp"
#include "collectives/topk/oktopk.hpp"
#include "collectives/topk/result.hpp"
#include "session/request.hpp"
#include "session/staged.hpp"

namespace telegrad {

/// The caller's memory must stay as it is until the request is done; after a failure until the communicator is closed.
struct Dense {
  ConstBytes input;
  Bytes output;  // may be the input
  DType dtype = DType::f32;
  Reduction reduction = Reduction::sum;
  Algorithm algorithm = Algorithm::automatic;
  std::shared_ptr<const Nodes> nodes{};  // of an allreduce; null: nothing is known of them
  bool gated = false;                    // begins when a stream says so, not as it is called
  std::shared_ptr<const GivenReduction> given{};  // in place of `reduction`, and of the type's size; `algorithm` is automatic
};

template <class V>
struct SparseSum {
  RequestPtr request;
  std::shared_ptr<std::optional<SparseVector<V>>> result;  // set once the request has succeeded
};

template <class V, class State>
struct TopkSum {
  RequestPtr request;
  std::shared_ptr<std::optional<TopkResult<V, State>>> result;  // set once the request has succeeded
};

/// `table` chooses the algorithm if none is named; all ranks hold the same. Without two levels of nodes it also chooses in
/// place of two_level, among the others. Ranks that have other nodes do not call the same. Throws std::invalid_argument for
/// Algorithm::mpi where it cannot do it.
RequestPtr make_all_reduce(const AllreduceTable& table, const Dense& dense);
/// The ranks' calls of a sum that goes by other means: it ends when all have called the same, and moves no elements.
RequestPtr make_announced_all_reduce(DType dtype, Reduction reduction, std::uint64_t count);
/// The same of f32, in messages that hold values as `how.encoding`; `how.reduction` is not looked at, and `algorithm` must
/// be automatic. `error`: empty, or as long as the input; see allreduce_quantised.
RequestPtr make_all_reduce_quantised(const Dense& dense, QuantisedSum how, Bytes error);
/// The same call, of a rank whose GPU encodes and decodes: see allreduce_encoded.
RequestPtr make_all_reduce_encoded(QuantisedSum how, const EncodedVectors& vectors);
/// To `root`, on whose rank alone `output` is looked at. `algorithm` must be automatic, here and below.
RequestPtr make_reduce(Rank size, const Dense& dense, Rank root);
/// `output`: this rank's block of `partition`, which is the same on all ranks.
RequestPtr make_reduce_scatter(const Dense& dense, Partition partition);
/// See allreduce_sparse(); `how.algorithm` may be automatic. With a rounding wire format the algorithm must not be
/// recursive_doubling (CHECKed). two_level without two levels of `how.nodes` is automatic. Where `how.nodes` count, which
/// `how.choice` says of automatic, ranks that have other nodes do not call the same.
template <class V>
SparseSum<V> make_all_reduce(SparseVector<V> vector, const SparseReduction& how);
/// The same, written densely into `output`.
template <class V>
RequestPtr make_all_reduce_into(SparseVector<V> vector, std::span<V> output, const SparseReduction& how);

/// The same call, of entries that lie there once the request's gate is open, to where a stream takes the sum: other ranks
/// may call one of the two above.
template <class V>
RequestPtr make_all_reduce_staged(const StagedEntries<V>& mine, const StagedSum<V>& sum, const SparseReduction& how,
                                  const StagedSum<float>& lost = {});
/// Likewise the call of make_reduce_scatter(), and that of make_all_gather() of vectors: see staged.hpp.
template <class V>
RequestPtr make_reduce_scatter_staged(const StagedEntries<V>& mine, Partition slices, const StagedSum<V>& sum,
                                      const SparseReduction& how, const StagedSum<float>& lost = {});
template <class V>
RequestPtr make_all_gather_staged(const StagedEntries<V>& mine, const StagedSum<V>& all, const SparseReduction& how,
                                  const StagedSum<float>& lost = {});

/// This rank's slice of the reduction: see reduce_scatter_sparse(). `slices`: as many as there are ranks, the same on all.
template <class V>
SparseSum<V> make_reduce_scatter(SparseVector<V> vector, Partition slices, const SparseReduction& how);

/// See allreduce_oktopk() and its rivals. Ranks that differ in algorithm, settings or state do not call the same.
/// Only Ok-Topk has a `residual`, and a wire that rounds.
template <class V>
TopkSum<V, OkTopkState> make_all_reduce_topk(SparseVector<V> vector, const OkTopkSettings& settings,
                                             const OkTopkState& state, Reduction reduction, WireFormat wire,
                                             std::span<float> residual = {});
template <class V>
TopkSum<V, GTopkState> make_all_reduce_topk(SparseVector<V> vector, const GTopkSettings& settings,
                                            const GTopkState& state, Reduction reduction, WireFormat wire,
                                            std::span<float> residual = {});
template <class V>
TopkSum<V, BoundedTopkState> make_all_reduce_topk(SparseVector<V> vector, const BoundedTopkSettings& settings,
                                                  const BoundedTopkState& state, Reduction reduction, WireFormat wire,
                                                  std::span<float> residual = {});

/// The same call of one of these three, of entries that lie there once the request's gate is open, to where a stream takes
/// the sum. `lost` gets what wire and sum lose of this rank's entries: errors of rounding, and the finite values of `left`.
template <class V, class Settings, class State>
TopkSum<V, State> make_all_reduce_topk_staged(const StagedEntries<V>& mine, const StagedSum<V>& sum,
                                              const StagedSum<float>& lost, const Settings& settings, const State& state,
                                              Reduction reduction, WireFormat wire);

/// The call of make_all_gather() of vectors, likewise; its result is their average: see average_gathered_staged().
template <class V>
RequestPtr make_average_gathered_staged(const StagedEntries<V>& mine, const StagedSum<V>& average,
                                        const SparseReduction& how, const StagedSum<float>& lost = {});

}  // namespace telegrad
