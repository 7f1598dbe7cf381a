#pragma once
// Vectors between ranks that share memory. A long one in the plain format goes in sections: its header, its indices and its
// values are messages of their own, which are read where they lie. Any other is one message, as between hosts; the first
// message tells which. What a vector is for, this must not know.

#include <cstddef>
#include <span>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "codec/slices.hpp"
#include "codec/sparse_vector.hpp"
#include "codec/wire.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Whether `view` is long enough, and `format` leaves indices and values as they are. Shorter ones are copied in less time
/// than more messages take.
template <class V>
bool goes_in_sections(const Transport& net, const SparseView<V>& view, const WireFormat& format);

/// Steps of a vector's messages, the same on all ranks; of its encoding, at most `most_bytes` long.
Step vector_steps(const Transport& net, std::size_t most_bytes);

/// All messages are under way at once; done when `view` may change. Uses vector_steps() steps from `first_step` on.
template <class V>
Task<void> send_in_sections(Transport& net, Rank to, Step first_step, SparseView<V> view);

/// Whether what follows are sections: `first` is the first message of a vector.
bool begins_sections(ConstBytes first);

/// The sections that `first` announces, to where their entries belong; `indices` is empty where they have none. Ends the
/// operation, naming `content`, unless it announces entries of `range` of these lengths, and they are in order.
template <class V>
Task<void> receive_sections(Transport& net, Rank from, Step first_step, ConstBytes first, IndexRange range,
                            std::span<std::uint32_t> indices, std::span<V> values, const char* content);

/// What is to come: entries of `range`, in at most `most_bytes` bytes.
struct ExpectedVector {
  DType dtype;
  IndexRange range;
  std::size_t most_bytes;
};

/// What follows `first`, the first message of a vector; as one message, whose entries nobody has looked at yet.
Task<Buffer> receive_rest_of_vector(Transport& net, Rank from, Step first_step, Buffer first, ExpectedVector expected);

/// From the first message on.
Task<Buffer> receive_vector(Transport& net, Rank from, Step first_step, ExpectedVector expected);

}  // namespace telegrad
