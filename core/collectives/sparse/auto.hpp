#pragma once

#include <span>

#include "base/types.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// The reduction of all ranks' streams, the same bits on every rank; V is float, double, bf16 or f16, or, in simulations
/// without values, CountedF32. An absent entry is the reduction's neutral element, and stands as
/// kernels::absent_element(reduction) in a dense result. An average of f16 is formed in f32 (see sparse/half_vectors.hpp). All
/// ranks pass the same dimension, and any number of entries each. `how.algorithm` (CHECKed):
///   split_allgather        k(P−1)/P entries each way, then K(P−1)/P, with k entries per rank and K in the sum, spread evenly
///   split_dense_allgather  k(P−1)/P entries, then the dense sum
///   ring                   P−1 messages of a growing sum of one slice each, then K(P−1)/P entries
///   recursive_doubling     log2 P messages of a growing sum: for few entries
///   two_level              inside nodes, between them, inside: see allreduce_sparse_two_level()
///   automatic              recursive_doubling, split_allgather or a dense sum, by what ranks find as they go; with
///                          `how.nodes` also two_level
/// What holds more than δ entries goes dense (see switch_entries()): a message by the bytes there, the result by the bytes
/// in memory. The result is dense also where one of its slices was.
/// Balanced slices stay sparse: where entries cluster they are narrow and full, and one of them must not make the whole
/// sum dense. Throws std::invalid_argument for a negative or NaN `switch_factor`.
template <class V>
Task<SparseStream<V>> allreduce_sparse(Transport& net, SparseStream<V> mine, SparseReduction how);

/// The same, written into `output`, which has as many elements as the dimension. It is written only once this rank has
/// heard from every other.
template <class V>
Task<void> allreduce_sparse_into(Transport& net, SparseStream<V> mine, SparseReduction how, std::span<V> output);

}  // namespace telegrad
