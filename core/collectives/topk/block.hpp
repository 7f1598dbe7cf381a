#pragma once
// Entries in messages of one size, known before anybody has an entry: so many as there are, then nothing that counts.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "base/types.hpp"
#include "codec/sparse_vector.hpp"

namespace telegrad {

/// How many entries a block has room for. It is laid out as u64 count, V values[], u32 indices[], each section padded to 8
/// bytes.
template <class V>
struct BlockShape {
  std::size_t capacity = 0;

  static constexpr std::size_t values_at() { return sizeof(std::uint64_t); }
  std::size_t indices_at() const { return values_at() + padded(capacity * sizeof(V)); }
  std::size_t bytes() const { return indices_at() + padded(capacity * sizeof(std::uint32_t)); }
  /// What is neither index nor value.
  std::size_t control_bytes() const { return bytes() - capacity * (sizeof(std::uint32_t) + sizeof(V)); }

 private:
  static std::size_t padded(std::size_t bytes) { return (bytes + 7) / 8 * 8; }
};

/// Writes all of the block; `entries` are sparse and fit (both CHECKed). Its address is a multiple of 8, and so it is when it
/// is read.
template <class V>
void write_block(const BlockShape<V>& shape, const SparseView<V>& entries, Bytes block);

/// `into`: the entries of the block, in which they lie. Returns what is wrong with it, and then sets nothing, or nothing: it
/// must hold strictly ascending indices of `range`, no more than there is room for.
template <class V>
std::string read_block(const BlockShape<V>& shape, ConstBytes block, IndexRange range, SparseView<V>& into);

}  // namespace telegrad
