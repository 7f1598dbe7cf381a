#pragma once
// The features that occur in some rows, numbered from 0 in their order: a bit for each feature, and a count for each word
// of bits, which fit into caches where a number for each feature would not.

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

namespace telegrad::linear {

class Numbering {
 public:
  /// Indices are below `features`, which are fewer than 2^32.
  Numbering(std::span<const std::uint32_t> indices, std::size_t features);

  std::size_t size() const { return size_; }

  /// The features that occur, rising, size() of them.
  void write_features(std::span<std::uint32_t> out) const;

  /// Of an index below `features`.
  bool contains(std::uint32_t index) const { return (occurs_[index / 64] >> index % 64 & 1) != 0; }

  /// Its number. It is among those that this was made of.
  std::uint32_t place_of(std::uint32_t index) const {
    const std::uint64_t below = occurs_[index / 64] & ((std::uint64_t{1} << index % 64) - 1);
    return before_[index / 64] + static_cast<std::uint32_t>(std::popcount(below));
  }

  /// Each index's number. Indices are among those that it was made of.
  void renumber(std::span<const std::uint32_t> indices, std::span<std::uint32_t> out) const;

 private:
  std::size_t size_ = 0;
  std::vector<std::uint64_t> occurs_;
  std::vector<std::uint32_t> before_;  // how many occur before each word's features
};

}  // namespace telegrad::linear
