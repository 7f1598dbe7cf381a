#pragma once
// The features that occur in some rows, numbered from 0 in their order, and behind them all others in theirs: a bit for
// each feature, and a count for each word of bits, which fit into caches where a number for each feature would not.

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

  /// The number of an index below `features`: below size() if it occurs.
  std::uint32_t place_of(std::uint32_t index) const {
    const Word& word = words_[index / 64];
    const std::uint32_t smaller = word.before + ones_of(word.occurs & ((std::uint64_t{1} << index % 64) - 1));
    // without a branch, as nobody foresees which features occur
    const std::uint32_t lacks = (static_cast<std::uint32_t>(word.occurs >> index % 64) & 1) - 1;
    return smaller + (lacks & (static_cast<std::uint32_t>(size_) + index - 2 * smaller));
  }

  /// Each index's number.
  void renumber(std::span<const std::uint32_t> indices, std::span<std::uint32_t> out) const;

 private:
  struct Word {
    std::uint64_t occurs = 0;
    std::uint32_t before = 0;  // how many occur before this word's features
  };

  // std::popcount, which is a call where the compiler may not take for granted that there is an instruction.
  static std::uint32_t ones_of(std::uint64_t bits) {
    bits -= bits >> 1 & 0x5555555555555555;
    bits = (bits & 0x3333333333333333) + (bits >> 2 & 0x3333333333333333);
    bits = (bits + (bits >> 4)) & 0x0f0f0f0f0f0f0f0f;
    return static_cast<std::uint32_t>(bits * 0x0101010101010101 >> 56);
  }

  std::size_t size_ = 0;
  std::vector<Word> words_;
};

}  // namespace telegrad::linear
