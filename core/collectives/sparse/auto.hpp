#pragma once
// The only place that chooses among sparse algorithms: by what the caller names, or by costs and what earlier sums had.

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// The reduction of all ranks' vectors, the same bits on every rank; V is float, double, bf16 or f16, or, in simulations
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
/// Throws std::invalid_argument for a negative or NaN `switch_factor`.
template <class V>
Task<SparseVector<V>> allreduce_sparse(Transport& net, SparseVector<V> mine, SparseReduction how);

/// The same, written into `output`, which has as many elements as the dimension. It is written only once this rank has
/// heard from every other.
template <class V>
Task<void> allreduce_sparse_into(Transport& net, SparseVector<V> mine, SparseReduction how, std::span<V> output);

/// The settings of one call, from what its caller wishes. Without two levels of nodes two_level is automatic, and where the
/// choice is open, nodes stay in it only if they count. With `choice` it also gets what earlier sums of its kind had in common.
template <class V>
SparseReduction settings_of_call(SparseReduction wished, std::uint64_t dimension);

/// Whether a rank should hold so many entries densely before it calls: that takes less memory, the algorithm is open, as
/// two_level without two levels is, and the sum is not formed from entries as they are.
template <class V>
bool begins_densely(std::uint64_t dimension, std::size_t entries, const SparseReduction& how);

/// A rank's entries as its addend: copied, and checked as validate_entries does, which throws. Where a sum may read and
/// check them where they lie they are borrowed instead, and must stay as they are until it is over; so are the values of
/// all elements, whose indices can only be one. `marks`: of the indices, if the caller has them.
template <class V>
SparseVector<V> addend_of(std::uint64_t dimension, std::span<const std::uint32_t> indices, std::span<const V> values,
                          const SparseReduction& how, std::span<const std::uint64_t> marks = {});

}  // namespace telegrad
