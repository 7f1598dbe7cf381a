#pragma once
// How a vector is divided among ranks.

#include <algorithm>
#include <cstddef>

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

}  // namespace telegrad
