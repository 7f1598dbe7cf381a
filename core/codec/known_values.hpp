#pragma once
// The sum of a slice as messages to those who gave entries of it. Where nobody else has an entry, the sum is what that rank
// gave, bit by bit, and left out of the message to it. So of values a rank receives K − k, if its k entries and the sum's K
// are all different: the least that there is (Renggli et al., "SparCML", SC 2019, Lemma 5.1). Such a message is
//
//   encode_indices() of the sum    the same for all receivers
//   marks                          a bit for each entry that the receiver gave, in words of 64: whether its value is left out
//   encode() of the other values   as a dense vector of so many elements
//
// How messages travel, and who owns a slice, this must not know.

#include <cstdint>
#include <span>
#include <string>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "codec/counted.hpp"
#include "codec/sparse_vector.hpp"
#include "codec/wire.hpp"

namespace telegrad {

/// Entries that a rank gave of a slice, and what the sum has been multiplied by since (1, or 1/P of an average).
template <class V>
struct GivenEntries {
  SparseView<V> entries;
  double factor = 1.0;

  /// Of a rank that has kept none: it is sent whole sums, and anything else is damaged.
  static GivenEntries none() {
    GivenEntries given;
    given.entries.dense = true;
    return given;
  }
};

/// Of one sum: sparse, with values as they are or packed (CHECKed), which stays where it is.
template <class V>
class SumMessages {
 public:
  /// `givers`: of each entry, if it is known, which ranks gave it (kernels::reduce_sorted_of()): that makes messages in less time.
  SumMessages(const SparseView<V>& sum, const WireFormat& format, Array<std::uint8_t> givers = {});

  /// The message to `receiver`, who gave `given`, in `own`; or encode() of the sum, the same for all, where leaving out saves
  /// nothing.
  ConstBytes to(Rank receiver, const GivenEntries<V>& given, Buffer& own);
  /// encode() of the sum.
  ConstBytes whole();

 private:
  std::size_t leave_out(Rank receiver, const GivenEntries<V>& given, std::span<std::uint64_t> known, std::span<V> rest) const;

  SparseView<V> sum_;
  WireFormat format_;
  Array<std::uint8_t> givers_;
  Buffer indices_;
  Buffer whole_;
};

/// Whether it is such a message; else it is one of encode().
bool leaves_values_out(ConstBytes message);

/// Reads a message that leaves values out, as decode() reads others; `given`: what this rank gave.
template <class V>
Decoded<V> decode_beside(ConstBytes message, IndexRange expected, const GivenEntries<V>& given);
/// The same into arrays, as decode_into() does.
template <class V>
std::string decode_beside_into(ConstBytes message, IndexRange expected, const GivenEntries<V>& given,
                               std::span<std::uint32_t> indices, std::span<V> values);

/// Of either sort: decode() and decode_into(), or those above.
template <class V>
Decoded<V> decode_sum(ConstBytes message, IndexRange expected, const GivenEntries<V>& given) {
  return leaves_values_out(message) ? decode_beside<V>(message, expected, given) : decode<V>(message, expected);
}
template <class V>
std::string decode_sum_into(ConstBytes message, IndexRange expected, const GivenEntries<V>& given,
                            std::span<std::uint32_t> indices, std::span<V> values) {
  return leaves_values_out(message) ? decode_beside_into<V>(message, expected, given, indices, values)
                                    : decode_into<V>(message, expected, indices, values);
}

/// The lengths of real messages: of own entries as many are left out as are to be expected.
template <>
class SumMessages<CountedF32> {
 public:
  SumMessages(const SparseView<CountedF32>& sum, const WireFormat& format, const Array<std::uint8_t>& /*givers*/ = {})
      : sum_(sum), format_(format) {}

  ConstBytes to(Rank receiver, const GivenEntries<CountedF32>& given, Buffer& own);
  ConstBytes whole();

 private:
  SparseView<CountedF32> sum_;
  WireFormat format_;
  Buffer whole_;
};
template <>
Decoded<CountedF32> decode_beside(ConstBytes message, IndexRange expected, const GivenEntries<CountedF32>& given);

}  // namespace telegrad
