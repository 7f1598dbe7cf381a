#pragma once

#include "base/types.hpp"
#include "collectives/support/partition.hpp"
#include "collectives/support/ring.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// mine = this rank's block of the sum (or another reduction) of all ranks' inputs. `partition` is the same on all ranks;
/// `input` has partition.count() elements, `mine` those of this rank's block, which may be none. They do not overlap.
/// Sends and receives (P−1)/P·n bytes per rank where blocks are alike. `mine` is written once this rank has heard from
/// every other. The way is chosen by what all ranks know alike.
Task<void> reduce_scatter(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Partition partition,
                          Bytes mine);

/// By halving: for short vectors, and blocks of very different lengths. See halving.hpp.
Task<void> reduce_scatter_halving(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Partition partition,
                                  Bytes mine);
/// Round a ring in P − 1 steps: for long vectors.
Task<void> reduce_scatter_ring(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Partition partition,
                               Bytes mine, LaneTuning tuning = {});

}  // namespace telegrad
