#pragma once
// A block of the index range, which some runs' entries are reduced into densely, and which is packed again. It is so short that it
// stays in the cache.
//
// Marks are bytes, which are stored, not bits, which would be read and written back: of neighbours, each would wait for
// the one before. A mark may say which runs have made it.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/buffer.hpp"
#include "kernels/entries.hpp"

namespace telegrad::kernels {

inline constexpr unsigned kBlockBits = 13;
inline constexpr std::uint32_t kBlock = 1U << kBlockBits;

template <class V>
struct BlockScratch {
  explicit BlockScratch(V neutral) { std::fill(results.begin(), results.end(), neutral); }

  static constexpr std::uint32_t kBehind = 64;  // readable behind the block's end

  Array<V> results{kBlock + kBehind};
  alignas(64) std::array<std::uint8_t, kBlock + kBehind> marks{};
};

/// Where blocks' entries go: behind the first `count` ones.
template <class V>
struct PackedBlocks {
  EntriesOut<V> out;
  std::uint8_t* marks;  // of each entry, if they are wanted
  std::size_t count = 0;
};

/// Packs the elements of block number `block` that are marked, ascending (CHECKed that there is room); they become `neutral` and unmarked.
/// `others_follow`: at least as many as fill a vector register, from other blocks.
template <class V>
void pack_block(BlockScratch<V>& scratch, std::uint32_t block, V neutral, PackedBlocks<V>& to, bool others_follow);

}  // namespace telegrad::kernels
