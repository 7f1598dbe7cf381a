#pragma once
// From a call that moves data, or only waits, to the Request that runs it. It must not know what runs Requests.
// Arguments have been checked by whoever offers this to users. `size`: the number of ranks. `blocks`, in bytes: by rank, the
// same on all ranks. The caller's memory must stay as it is until the request is done; after a failure until the
// communicator is closed.

#include <memory>
#include <optional>
#include <vector>

#include "base/types.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/support/partition.hpp"
#include "session/request.hpp"

namespace telegrad {

RequestPtr make_all_gather(DType dtype, ConstBytes mine, Bytes all, const Partition& blocks);
/// `all`: of the root, empty elsewhere.
RequestPtr make_gather(DType dtype, ConstBytes mine, Bytes all, const Partition& blocks, Rank root);
/// `all`: of the root, empty elsewhere.
RequestPtr make_scatter(DType dtype, ConstBytes all, Bytes mine, const Partition& blocks, Rank root);
RequestPtr make_all_to_all(Rank size, DType dtype, ConstBytes input, Bytes output);
/// `sent` and `received`: in bytes, of this rank.
RequestPtr make_all_to_all_v(DType dtype, ConstBytes input, Bytes output, const Partition& sent,
                             const Partition& received);
RequestPtr make_broadcast(Rank size, DType dtype, Bytes data, Rank root);
RequestPtr make_barrier();

template <class V>
struct GatheredVectors {
  RequestPtr request;
  std::shared_ptr<std::optional<std::vector<SparseVector<V>>>> result;  // by rank; set once the request has succeeded
};

/// See allgather_sparse().
template <class V>
GatheredVectors<V> make_all_gather(SparseVector<V> vector, const SparseReduction& how);

}  // namespace telegrad
