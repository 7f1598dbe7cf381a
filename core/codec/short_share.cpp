#include "codec/short_share.hpp"

#include "base/check.hpp"

namespace telegrad {

template <class V>
Buffer encode_short(const SparseView<V>& share) {
  TELEGRAD_CHECK(!share.dense);
  Buffer message(most_short_bytes<V>(share.nnz()) + kVarintBytesMost);
  std::byte* at = message.data();
  auto next = static_cast<std::uint32_t>(share.range.begin);
  for (std::size_t i = 0; i < share.nnz(); ++i) {
    const std::uint32_t index = share.indices[i];  // once: its owner may change it meanwhile
    at = put_varint(at, index - next);
    next = index + 1;
    std::memcpy(at, &share.values[i], sizeof(V));
    at += sizeof(V);
  }
  message.truncate(static_cast<std::size_t>(at - message.data()));
  return message;
}

#define TELEGRAD_INSTANTIATE(V) template Buffer encode_short(const SparseView<V>&);
TELEGRAD_FOR_FLOAT_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
