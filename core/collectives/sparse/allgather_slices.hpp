#pragma once
// The second half of a sparse allreduce over owned slices: each owner's slice goes to all. Encoded once, round a ring, so that
// everybody, the owner too, decodes the same bytes; or, where ranks share memory, from its owner to where it is wanted.

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "codec/slices.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/sparse/output.hpp"
#include "collectives/support/partition.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// A rank's slice as it is sent. `slices`: all ranks', which cover the index range.
template <class V>
struct EncodedSlice {
  Partition slices;
  Buffer encoded{};
  OwnedSlice<V> owned{};  // instead of the encoding, where that would be a copy of it (see goes_in_sections())
  std::uint64_t count = 0;  // see announced_count()
  std::size_t most_bytes = 0;
  Step first_step = 0;  // of the messages that gather
};

/// Who holds how much is news worth messages of its own where slices are long, and few. The same whatever a rank wants the
/// sum as: their messages are alike.
template <class V>
bool counts_go_ahead(const Transport& net, const Partition& slices) {
  return net.size() <= 64 && most_bytes<V>(slices) >= 4 * Transport::kSliceBytes;
}

/// `result.slices` is set; becomes the rest but first_step. A slice goes dense first where `how` finds that shorter.
/// `net`: the one that gathers. `weight`: how much an error of what is encoded counts.
template <class V>
Task<void> encode_slice(Transport& net, OwnedSlice<V> owned, const SparseReduction& how, float weight,
                        EncodedSlice<V>& result);

/// All ranks' slices, of a vector (dense where one of them is, or where it holds more than δ entries in memory) or written
/// into a vector.
template <class V>
Task<void> allgather_slices(Transport& net, EncodedSlice<V> owned, const SparseReduction& how, SparseOutput<V>& out);
template <class V>
Task<void> allgather_slices(Transport& net, EncodedSlice<V> owned, const SparseReduction& how, DenseOutput<V>& out);

}  // namespace telegrad
