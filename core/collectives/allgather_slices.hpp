#pragma once
// The second half of a sparse allreduce over owned slices: each owner's slice goes to all. Encoded once, round a ring, so that
// everybody, the owner too, decodes the same bytes; or from its owner to everybody: among few ranks, but for what these gave
// themselves (exchange_sums.hpp), and where ranks share memory, to where it is wanted.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "collectives/partition.hpp"
#include "collectives/sparse_messages.hpp"
#include "collectives/sparse_split.hpp"
#include "sparse/slices.hpp"
#include "sparse/stream.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// What slices are sums of: a rank needs no message of its values that nobody else has added to.
template <class V>
struct Addends {
  SparseStream<V> mine;
  GivenShares<V> given;  // of this rank's slice; its own entries lie in `mine`; none where nothing is left out of it
  double factor = 1.0;   // that the sums have been multiplied by since
};

/// A rank's slice as it is sent. `slices`: all ranks', which cover the index range.
template <class V>
struct EncodedSlice {
  Partition slices;
  std::optional<Addends<V>> addends{};  // only where exchanges_sums()
  Buffer encoded{};
  // Instead of the encoding, where that would be a copy of it (see goes_in_sections()), and where each gets another one.
  OwnedSlice<V> owned{};
  std::uint64_t count = 0;  // of entries, or kDenseSlice
  std::size_t most_bytes = 0;
  Step first_step = 0;  // of the messages that gather
};
inline constexpr std::uint64_t kDenseSlice = ~std::uint64_t{0};

/// Whether slices that `net` gathers go from their owners to everybody between hosts (exchange_sums.hpp), so that values that
/// their receiver gave may be left out; the same on all ranks.
template <class V>
bool exchanges_sums(const Transport& net, const Partition& slices, const SparseReduction& how);

/// `result.slices` and `result.addends` are set; becomes the rest but first_step. A slice goes dense first where `how` finds that shorter.
/// `net`: the one that gathers. `weight`: how much an error of what is encoded counts.
template <class V>
Task<void> encode_slice(Transport& net, OwnedSlice<V> owned, const SparseReduction& how, float weight,
                        EncodedSlice<V>& result);

/// All ranks' slices as one stream: dense where one of them is, or where it holds more than δ entries in memory.
template <class V>
Task<SparseStream<V>> allgather_slices(Transport& net, EncodedSlice<V> owned, const SparseReduction& how);

/// The same, written into `output`. `entries`: about how many there are is added to it.
template <class V>
Task<void> allgather_slices_into(Transport& net, EncodedSlice<V> owned, const SparseReduction& how, std::span<V> output,
                                 double& entries);

}  // namespace telegrad
