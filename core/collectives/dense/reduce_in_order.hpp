#pragma once

#include "base/given_reduction.hpp"
#include "base/types.hpp"
#include "collectives/support/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// output = x0 ∘ x1 ∘ … of all ranks' inputs, from left to right: a function of the inputs alone. Both have the same length on
/// all ranks, whole elements of `how`; they are the same memory, or do not overlap. `output` is written once this rank has
/// heard from every other.
Task<void> allreduce_in_order(Transport& net, const GivenReduction& how, ConstBytes input, Bytes output);
/// The same on `root`; elsewhere `output` is not looked at.
Task<void> reduce_in_order(Transport& net, const GivenReduction& how, Rank root, ConstBytes input, Bytes output);
/// mine = this rank's block of it; `partition` is of elements, the same on all ranks.
Task<void> reduce_scatter_in_order(Transport& net, const GivenReduction& how, ConstBytes input, const Partition& partition,
                                   Bytes mine);

}  // namespace telegrad
