#include "kernels/random_subset.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <set>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/philox.hpp"
#include "kernels/select.hpp"

namespace telegrad::kernels {
namespace {

using philox::Counter;
using philox::Key;

using DrawFunction = void(const Counter& first, const Key& key, std::uint32_t* words);

#ifdef TELEGRAD_KERNELS_X86
constexpr Variants<DrawFunction> kDraw{philox::draw_portable, philox::draw_avx2, philox::draw_avx512};
#else
constexpr Variants<DrawFunction> kDraw{philox::draw_portable};
#endif

// Positions below `size`, one after the other, of two words each: of one word, some would be likelier by size / 2^32.
class Positions {
 public:
  Positions(const Draw& draw, std::uint64_t size, DrawFunction* words)
      : size_(size),
        draw_words_(words),
        counter_{0, draw.call, draw.rank, draw.vector},
        key_{static_cast<std::uint32_t>(draw.seed), static_cast<std::uint32_t>(draw.seed >> 32)} {}

  std::uint64_t next() {
    if (used_ == words_.size()) {
      draw_words_(counter_, key_, words_.data());
      counter_[0] += philox::kCounters;
      used_ = 0;
    }
    const std::uint64_t high = words_[used_], low = words_[used_ + 1];
    used_ += 2;
    return (high * size_ + ((low * size_) >> 32)) >> 32;
  }

 private:
  std::uint64_t size_;
  DrawFunction* draw_words_;
  Counter counter_;
  Key key_;
  std::array<std::uint32_t, philox::kGroup> words_;
  std::size_t used_ = philox::kGroup;
};

void check(std::size_t size, std::span<const std::uint32_t> indices) {
  TELEGRAD_CHECK(size <= std::uint64_t{1} << 32 && indices.size() <= size);
}

}  // namespace

// The first different positions of the sequence; of more than half of all, those that the rest of the set would have.
void random_subset(const Draw& draw, std::size_t size, std::span<std::uint32_t> indices) {
  check(size, indices);
  if (indices.empty()) return;
  const bool mark_absent = indices.size() > size / 2;
  Positions positions(draw, size, kDraw.at(simd_level()));
  const std::size_t words = (size + 63) / 64;
  const Array<std::uint64_t> marks(words);
  std::fill_n(marks.data(), words, std::uint64_t{0});
  for (std::size_t left = mark_absent ? size - indices.size() : indices.size(); left != 0;) {
    const std::uint64_t position = positions.next();
    std::uint64_t& word = marks[position / 64];
    left -= (~word >> (position % 64)) & 1;
    word |= std::uint64_t{1} << (position % 64);
  }
  std::size_t count = 0;
  for (std::size_t i = 0; i < words; ++i) {
    std::uint64_t word = mark_absent ? ~marks[i] : marks[i];
    if (i + 1 == words && size % 64 != 0) word &= (std::uint64_t{1} << (size % 64)) - 1;
    for (; word != 0; word &= word - 1) {
      indices[count++] = static_cast<std::uint32_t>(i * 64 + static_cast<std::size_t>(std::countr_zero(word)));
    }
  }
  TELEGRAD_CHECK(count == indices.size());
}

Chosen accumulate_random(std::span<float> residual, std::span<const float> gradient, const Draw& draw,
                         std::uint32_t index_offset, EntriesOut<float> out) {
  TELEGRAD_CHECK(out.indices.size() == out.values.size());
  TELEGRAD_CHECK(residual.size() + index_offset <= std::uint64_t{1} << 32);
  const Moments moments = accumulate_moments(residual, gradient, Side::both);
  random_subset(draw, residual.size(), out.indices);
  for (std::size_t i = 0; i < out.capacity(); ++i) {
    float& value = residual[out.indices[i]];
    out.values[i] = value;
    value = 0.0F;
    out.indices[i] += index_offset;
  }
  return {out.capacity(), 0.0F, moments.largest};
}

namespace reference {

void random_subset(const Draw& draw, std::size_t size, std::span<std::uint32_t> indices) {
  check(size, indices);
  const bool mark_absent = indices.size() > size / 2;
  const std::size_t marked = mark_absent ? size - indices.size() : indices.size();
  Positions positions(draw, size, philox::draw_portable);
  std::set<std::uint64_t> marks;
  while (marks.size() < marked) marks.insert(positions.next());
  std::size_t count = 0;
  for (std::uint64_t i = 0; i < size; ++i) {
    if (marks.contains(i) != mark_absent) indices[count++] = static_cast<std::uint32_t>(i);
  }
}

}  // namespace reference

}  // namespace telegrad::kernels
