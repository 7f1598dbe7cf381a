#include "linear/numbering.hpp"

#include <bit>

namespace telegrad::linear {

Numbering::Numbering(std::span<const std::uint32_t> indices, std::size_t features)
    : words_((features + 63) / 64) {
  for (const std::uint32_t index : indices) words_[index / 64].occurs |= std::uint64_t{1} << index % 64;
  for (Word& word : words_) {
    word.before = static_cast<std::uint32_t>(size_);
    size_ += static_cast<std::size_t>(std::popcount(word.occurs));
  }
}

void Numbering::write_features(std::span<std::uint32_t> out) const {
  std::size_t count = 0;
  for (std::size_t word = 0; word < words_.size(); ++word) {
    for (std::uint64_t bits = words_[word].occurs; bits != 0; bits &= bits - 1) {
      out[count++] = static_cast<std::uint32_t>(word * 64 + static_cast<std::size_t>(std::countr_zero(bits)));
    }
  }
}

void Numbering::renumber(std::span<const std::uint32_t> indices, std::span<std::uint32_t> out) const {
  for (std::size_t i = 0; i < indices.size(); ++i) out[i] = place_of(indices[i]);
}

}  // namespace telegrad::linear
