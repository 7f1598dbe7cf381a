#pragma once
// Some tens of entries of a range without a header: of each entry how far its index is behind the last one, as a varint, and
// its value. With k entries evenly spread over n indices that is 1 byte an index up to n/k = 128 or so, and 2 up to 16,384.
// How many there are follows from the number of bytes, or the reader knows it. Values are as they are.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "codec/slices.hpp"
#include "codec/sparse_vector.hpp"
#include "codec/varint.hpp"

namespace telegrad {

/// No share of so many entries is longer: an index is below 2^32.
template <class V>
constexpr std::size_t most_short_bytes(std::uint64_t entries) {
  return static_cast<std::size_t>(entries) * (5 + sizeof(V));
}

/// `share` is sparse (CHECKed). No entries are no bytes.
template <class V>
Buffer encode_short(const SparseView<V>& share);

/// Reads entries one by one, from messages that nobody vouches for.
template <class V>
class ShortShareReader {
 public:
  ShortShareReader(ConstBytes bytes, IndexRange range) : rest_(bytes), next_(range.begin), end_(range.end) {}

  /// False if there is no entry of the range.
  bool take(std::uint32_t& index, V& value) {
    std::uint64_t gap = 0;
    if (!take_varint(rest_, gap) || gap >= end_ - next_ || rest_.size() < sizeof value) return false;
    index = static_cast<std::uint32_t>(next_ + gap);
    next_ += gap + 1;
    std::memcpy(&value, rest_.data(), sizeof value);
    rest_ = rest_.subspan(sizeof value);
    return true;
  }
  /// What follows.
  ConstBytes rest() const { return rest_; }

 private:
  ConstBytes rest_;
  std::uint64_t next_;
  std::uint64_t end_;
};

/// Exactly as many entries as `indices` and `values` have; false where the message does not hold them.
template <class V>
bool read_short(ConstBytes message, IndexRange range, std::span<std::uint32_t> indices, std::span<V> values) {
  ShortShareReader<V> reader(message, range);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (!reader.take(indices[i], values[i])) return false;
  }
  return reader.rest().empty();
}

inline constexpr const char* kDamagedShort = "its bytes are not the ascending entries of that range";

}  // namespace telegrad
