#pragma once
// The binomial tree in which blocks of many ranks are gathered and scattered. Numbers are counted from the root: rank v of
// the tree is rank (root + v) mod P.

#include <algorithm>
#include <bit>

#include "collectives/support/partition.hpp"

namespace telegrad {

struct RootedTree {
  Rank root;
  Rank size;
  Rank self;  // this rank's number

  RootedTree(Rank rank, Rank the_root, Rank ranks) : root(the_root), size(ranks), self((rank + ranks - the_root) % ranks) {}

  Rank rank_of(Rank number) const { return (root + number) % size; }
  /// Numbers [self, self + reach()) are below this rank, itself included.
  Rank reach() const { return std::min(span(), size - self); }
  Rank parent() const { return self - span(); }
  /// How many are below the child whose number is self + distance, itself included; 0: there is none. Distances are powers
  /// of two below span().
  Rank reach_of_child(Rank distance) const {
    return self + distance < size ? std::min(distance, size - self - distance) : 0;
  }
  /// As reach(), if the tree were full.
  Rank span() const { return self == 0 ? std::bit_ceil(size) : self & (~self + 1); }

  /// From so many ranks on, and for blocks of up to so many bytes, a few long messages are cheaper than many short ones:
  /// log2 P·α against (P−1) times what sending a message costs a processor.
  static bool suits(Rank ranks, const Partition& blocks) {
    constexpr Rank kRanksLeast = 16;
    constexpr std::size_t kBlockBytesMost = 2048;
    return ranks >= kRanksLeast && blocks.alike() && blocks.count() <= ranks * kBlockBytesMost;
  }
};

}  // namespace telegrad
