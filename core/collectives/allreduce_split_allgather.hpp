#pragma once

#include <span>

#include "base/types.hpp"
#include "sparse/stream.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// The reduction of all ranks' streams, the same bits on every rank; V is float, double, bf16 or f16, or, in simulations
/// without values, CountedF32. An absent entry is the reduction's neutral element, and stands as
/// kernels::absent_element(reduction) in a dense result. All ranks pass the same dimension, and any number of entries each. With k entries per rank and K
/// in the sum, spread evenly, a rank sends k(P−1)/P entries and receives as many, and then sends and receives K(P−1)/P.
/// What holds more than δ entries goes dense (see switch_entries()): a slice on the wire by the bytes there, the result
/// by the bytes in memory; `switch_factor` scales δ. The result is dense also where one of its slices was.
/// Throws std::invalid_argument for a negative or NaN `switch_factor`.
template <class V>
Task<SparseStream<V>> allreduce_split_allgather(Transport& net, SparseStream<V> mine, Reduction reduction,
                                                double switch_factor);

/// The same, written into `output`, which has as many elements as the dimension. It is written only once this rank has heard from every other.
template <class V>
Task<void> allreduce_split_allgather_into(Transport& net, SparseStream<V> mine, Reduction reduction,
                                          double switch_factor, std::span<V> output);

}  // namespace telegrad
