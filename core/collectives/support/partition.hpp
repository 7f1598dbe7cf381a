#pragma once
// A vector in blocks, one for each rank.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/check.hpp"
#include "base/random.hpp"
#include "collectives/support/blocks.hpp"

namespace telegrad {

/// One consecutive block of elements (where they are only moved: of bytes) for each rank: all alike, as part_of() makes
/// them, or of any lengths.
class Partition {
 public:
  Partition(std::size_t count, std::size_t blocks) : count_(count), blocks_(blocks) {}
  /// `lengths`: of each rank's block.
  explicit Partition(std::span<const std::uint64_t> lengths) : blocks_(lengths.size()) {
    for (const std::uint64_t length : lengths) count_ += static_cast<std::size_t>(length);
    if (std::ranges::adjacent_find(lengths, std::not_equal_to()) == lengths.end()) return;
    begins_.reserve(blocks_);
    std::size_t begin = 0;
    for (const std::uint64_t length : lengths) {
      begins_.push_back(begin);
      begin += static_cast<std::size_t>(length);
      longest_ = std::max(longest_, static_cast<std::size_t>(length));
    }
  }

  std::size_t count() const { return count_; }
  std::size_t blocks() const { return blocks_; }
  bool alike() const { return begins_.empty(); }
  std::size_t longest() const { return begins_.empty() ? (count_ + blocks_ - 1) / blocks_ : longest_; }
  Range operator[](std::size_t block) const { return {begin(block), begin(block + 1)}; }
  /// Where `block` begins; number blocks() is the end of the vector.
  std::size_t begin(std::size_t block) const {
    if (begins_.empty()) return part_of({0, count_}, blocks_, block).begin;
    return block == blocks_ ? count_ : begins_[block];
  }
  /// 0 where blocks are alike; otherwise it differs, but for bad luck, where lengths differ.
  std::uint64_t digest() const {
    std::uint64_t digest = 0;
    for (const std::size_t begin : begins_) digest = mix(digest + begin + 1);
    return digest == 0 && !begins_.empty() ? 1 : digest;
  }

 private:
  std::size_t count_ = 0;
  std::size_t blocks_ = 0;
  std::size_t longest_ = 0;
  std::vector<std::size_t> begins_;  // empty: alike
};

/// Consecutive blocks of a vector whose last block is followed by its first.
class Arc {
 public:
  /// `length` blocks from block `first` on, both at most partition.blocks().
  Arc(const Partition& partition, std::size_t first, std::size_t length)
      : begin_(partition.begin(first)), count_(partition.count()) {
    TELEGRAD_CHECK(length <= partition.blocks());
    const std::size_t last = first + length;
    const std::size_t blocks = partition.blocks();
    size_ = (last <= blocks ? partition.begin(last) : count_ + partition.begin(last - blocks)) - begin_;
  }

  std::size_t size() const { return size_; }
  /// Where the elements `within` of the arc lie in the vector: in one range, or in two if the vector's end is between
  /// them. The second is empty otherwise.
  std::array<Range, 2> ranges(Range within) const {
    const Range there{begin_ + within.begin, begin_ + within.end};
    if (there.begin >= count_) return {Range{there.begin - count_, there.end - count_}, Range{}};
    return {Range{there.begin, std::min(there.end, count_)}, Range{0, std::max(there.end, count_) - count_}};
  }

 private:
  std::size_t begin_ = 0;
  std::size_t size_ = 0;
  std::size_t count_ = 0;
};

}  // namespace telegrad
