#pragma once
// How a vector is divided among ranks.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.hpp"

namespace telegrad {

/// Elements [begin, end).
struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t size() const { return end - begin; }
};

/// The `index`-th of `parts` consecutive ranges of `whole`; sizes differ by one at most, and the first are the larger.
inline Range part_of(Range whole, std::size_t parts, std::size_t index) {
  const std::size_t least = whole.size() / parts;
  const std::size_t larger = whole.size() % parts;
  const std::size_t begin = whole.begin + least * index + std::min(index, larger);
  return {begin, begin + least + (index < larger ? 1 : 0)};
}

/// One consecutive block of a vector for each rank: all alike as part_of() makes them, or of any lengths.
class Blocks {
 public:
  Blocks(std::size_t count, std::size_t parts) : count_(count), parts_(parts) {}
  /// `lengths`: elements of each rank's block.
  explicit Blocks(std::span<const std::uint64_t> lengths) : parts_(lengths.size()) {
    begins_.reserve(parts_);
    for (const std::uint64_t length : lengths) {
      begins_.push_back(count_);
      count_ += static_cast<std::size_t>(length);
      longest_ = std::max(longest_, static_cast<std::size_t>(length));
    }
  }

  std::size_t count() const { return count_; }
  std::size_t parts() const { return parts_; }
  std::size_t longest() const { return begins_.empty() ? (count_ + parts_ - 1) / parts_ : longest_; }
  Range operator[](std::size_t index) const { return {begin(index), begin(index + 1)}; }
  /// Where block `index` begins; that of block parts() is the end of the vector.
  std::size_t begin(std::size_t index) const {
    if (begins_.empty()) return part_of({0, count_}, parts_, index).begin;
    return index == parts_ ? count_ : begins_[index];
  }

 private:
  std::size_t count_ = 0;
  std::size_t parts_ = 0;
  std::size_t longest_ = 0;
  std::vector<std::size_t> begins_;  // empty: alike
};

/// Consecutive blocks of a vector whose last block is followed by its first.
class Arc {
 public:
  /// `length` blocks from block `first` on, both at most blocks.parts().
  Arc(const Blocks& blocks, std::size_t first, std::size_t length)
      : begin_(blocks.begin(first)), count_(blocks.count()) {
    TELEGRAD_CHECK(first <= blocks.parts() && length <= blocks.parts());
    const std::size_t last = first + length;
    const std::size_t end = last <= blocks.parts() ? blocks.begin(last) : count_ + blocks.begin(last - blocks.parts());
    size_ = end - begin_;
  }

  std::size_t size() const { return size_; }
  /// Where the elements `within` of the arc lie in the vector: in one range, or in two if its end lies between them.
  /// The second is empty otherwise.
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
