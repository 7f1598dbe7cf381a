#include "kernels/pack_plan.hpp"

#include <algorithm>

#include "base/check.hpp"

namespace telegrad::kernels {
namespace {

// Runs are read one by one: only where they are this long on average are they as fast as gaps.
constexpr std::uint32_t kRunLeast = 4;

std::uint32_t breaks_in(const std::uint32_t* indices, std::size_t count) {
  std::uint32_t breaks = 0;
  for (std::size_t i = 0; i < count; ++i) breaks += indices[i + 1] - indices[i] != 1 ? 1U : 0U;
  return breaks;
}

}  // namespace

PackedBlock packed_block(std::uint32_t first, std::uint32_t last, std::uint32_t count, std::uint32_t breaks) {
  PackedBlock block{.first = first, .count = count};
  const std::uint32_t gaps = count - 1;
  const std::uint32_t missing = last - first - gaps;
  if (missing == 0) return block;
  block.width = elias_fano_width(gaps, missing);
  block.payload_bytes = elias_fano_low_bytes(gaps, block.width) + elias_fano_high_bytes(gaps, missing, block.width);
  if ((breaks + 1) * kRunLeast > count) return block;
  const unsigned width = elias_fano_width(breaks, missing - breaks);
  const std::size_t bytes =
      RunSections(count, breaks, width).missing_highs() + elias_fano_high_bytes(breaks, missing - breaks, width);
  if (bytes >= block.payload_bytes) return block;
  return {.first = first, .count = count, .runs = true, .width = width, .payload_bytes = bytes};
}

PackPlan::PackPlan(std::span<const std::uint32_t> indices) : indices_(indices) {
  TELEGRAD_CHECK(indices.size() <= kPackedBlockMost);
  if (indices.empty()) return;
  std::size_t leaves = 0;
  for (std::size_t begin = 0; begin < indices.size(); begin += kPackedBlockLeast, ++leaves) {
    const std::size_t end = std::min(begin + kPackedBlockLeast, indices.size() - 1);
    breaks_before_[leaves + 1] = breaks_before_[leaves] + breaks_in(indices.data() + begin, end - begin);
  }
  cut(0, kLeaves);
}

PackedBlock PackPlan::whole(std::size_t begin, std::size_t end) const {
  const std::size_t first = begin * kPackedBlockLeast;
  const std::size_t last = std::min(end * kPackedBlockLeast, indices_.size()) - 1;
  std::uint32_t breaks = breaks_before_[end] - breaks_before_[begin];
  if (last + 1 < indices_.size() && indices_[last + 1] - indices_[last] != 1) --breaks;  // it lies behind the block
  return packed_block(indices_[first], indices_[last], static_cast<std::uint32_t>(last + 1 - first), breaks);
}

// Appends the blocks of so many leaves, a power of two of them but for the end; returns their bytes.
std::size_t PackPlan::cut(std::size_t leaf, std::size_t leaves) {
  const std::size_t held = (indices_.size() + kPackedBlockLeast - 1) / kPackedBlockLeast;
  if (leaf >= held) return 0;
  const PackedBlock one = whole(leaf, std::min(leaf + leaves, held));
  const std::size_t size = size_;
  if (leaves > 1 && one.payload_bytes > kPackedHeaderBytes) {
    const std::size_t halves = cut(leaf, leaves / 2) + cut(leaf + leaves / 2, leaves / 2);
    if (halves < one.bytes()) return halves;
    size_ = size;
  }
  blocks_[size_++] = one;
  return one.bytes();
}

}  // namespace telegrad::kernels
