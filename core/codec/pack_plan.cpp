#include "codec/pack_plan.hpp"

#include <algorithm>
#include <bit>

#include "base/check.hpp"
#include "codec/gap_code.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/intrinsics.hpp"

namespace telegrad::kernels {
namespace {

// Runs are read one by one: only where they are this long on average are they as fast as gaps.
constexpr std::uint32_t kRunLeast = 4;

// Of `count` indices, after which one more stands, how many are not followed by their successor.
using BreaksFunction = std::uint32_t(const std::uint32_t* indices, std::size_t count);

std::uint32_t breaks_portable(const std::uint32_t* indices, std::size_t count) {
  std::uint32_t breaks = 0;
  for (std::size_t i = 0; i < count; ++i) breaks += indices[i + 1] - indices[i] != 1 ? 1U : 0U;
  return breaks;
}

#ifdef TELEGRAD_KERNELS_X86

TELEGRAD_AVX2 std::uint32_t breaks_avx2(const std::uint32_t* indices, std::size_t count) {
  __m256i follow = _mm256_setzero_si256();  // minus the number of followed ones
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i here = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(indices + i));
    const __m256i next = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(indices + i + 1));
    const __m256i is_next = _mm256_cmpeq_epi32(_mm256_sub_epi32(next, here), _mm256_set1_epi32(1));
    follow = _mm256_add_epi32(follow, is_next);
  }
  const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(follow), _mm256_extracti128_si256(follow, 1));
  const __m128i quarter = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  const int sum = _mm_extract_epi32(quarter, 0) + _mm_extract_epi32(quarter, 1);
  return static_cast<std::uint32_t>(static_cast<int>(i) + sum) + breaks_portable(indices + i, count - i);
}

TELEGRAD_AVX512 std::uint32_t breaks_avx512(const std::uint32_t* indices, std::size_t count) {
  std::uint32_t breaks = 0;
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512i gap = _mm512_sub_epi32(_mm512_loadu_si512(indices + i + 1), _mm512_loadu_si512(indices + i));
    breaks += static_cast<std::uint32_t>(std::popcount(_mm512_cmpneq_epi32_mask(gap, _mm512_set1_epi32(1))));
  }
  return breaks + breaks_portable(indices + i, count - i);
}

constexpr Variants<BreaksFunction> kBreaks{breaks_portable, breaks_avx2, breaks_avx512};

#else

constexpr Variants<BreaksFunction> kBreaks{breaks_portable};

#endif

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
    breaks_before_[leaves + 1] = breaks_before_[leaves] + kBreaks(indices.data() + begin, end - begin);
  }
  cut(0, kLeaves);
  std::size_t done = 0;
  for (PackedBlock& block : std::span(blocks_).first(size_)) {
    if (!block.runs && block.payload_bytes > 0) {
      const std::uint32_t last = last_gap_number(indices.subspan(done, block.count), block.width);
      const std::uint32_t gaps = block.count - 1;
      block.payload_bytes = elias_fano_low_bytes(gaps, block.width) +
                            elias_fano_high_bytes(gaps, last - block.first - gaps, block.width);
    }
    done += block.count;
  }
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
