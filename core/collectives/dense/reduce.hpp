#pragma once

#include "base/types.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Which way reduce_to_root() goes; all ranks answer alike.
bool reduces_by_tree(Rank size, std::size_t bytes);

/// output = the sum (or another reduction) of all ranks' inputs, on rank `root`; elsewhere `output` is not looked at.
/// `input` has the same length on all ranks; the root's `output` has that length too, and is the same memory or does not
/// overlap. It is written once the root has heard from every other rank.
Task<void> reduce_to_root(Transport& net, Rank root, DType dtype, Reduction reduction, ConstBytes input, Bytes output);

/// Up a binomial tree: for short vectors.
Task<void> reduce_tree(Transport& net, Rank root, DType dtype, Reduction reduction, ConstBytes input, Bytes output);
/// Every rank reduces its own block and sends it to the root: for long vectors.
Task<void> reduce_scatter_gather(Transport& net, Rank root, DType dtype, Reduction reduction, ConstBytes input,
                                 Bytes output);

}  // namespace telegrad
