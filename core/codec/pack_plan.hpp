#pragma once
// How pack_indices() cuts indices into blocks, and what each takes. Knows sizes, writes no bytes.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/elias_fano.hpp"
#include "codec/pack_indices.hpp"

namespace telegrad::kernels {

/// The sections of a block of `count` indices in `breaks` + 1 runs. Of the missing numbers only their reader and their
/// writer know the width; that of the present ones follows from the counts.
struct RunSections {
  static constexpr std::size_t kCountBytes = 2;

  RunSections(std::uint32_t count, std::uint32_t breaks, unsigned missing_width)
      : present_width(elias_fano_width(breaks, count - 1 - breaks)),
        missing_low_bytes(elias_fano_low_bytes(breaks, missing_width)),
        present_low_bytes(elias_fano_low_bytes(breaks, present_width)),
        present_high_bytes(elias_fano_high_bytes(breaks, count - 1 - breaks, present_width)) {}

  /// Where the high section of the missing begins: it goes to the payload's end.
  std::size_t missing_highs() const {
    return kCountBytes + missing_low_bytes + present_low_bytes + present_high_bytes;
  }

  unsigned present_width;
  std::size_t missing_low_bytes;
  std::size_t present_low_bytes;
  std::size_t present_high_bytes;
};

/// The blocks of at most kPackedBlockMost indices, in order.
class PackPlan {
 public:
  explicit PackPlan(std::span<const std::uint32_t> indices);

  std::span<const PackedBlock> blocks() const { return {blocks_.data(), size_}; }

 private:
  static constexpr std::size_t kLeaves = kPackedBlockMost / kPackedBlockLeast;

  PackedBlock whole(std::size_t begin, std::size_t end) const;
  std::size_t cut(std::size_t leaf, std::size_t leaves);

  std::span<const std::uint32_t> indices_;
  std::array<std::uint32_t, kLeaves + 1> breaks_before_{};  // indices before leaf i whose next one does not follow
  std::array<PackedBlock, kLeaves> blocks_;
  std::size_t size_ = 0;
};

/// The block of `count` indices from `first` to `last` with `breaks` places where the next does not follow; of gaps, the most
/// that its payload may have.
PackedBlock packed_block(std::uint32_t first, std::uint32_t last, std::uint32_t count, std::uint32_t breaks);

}  // namespace telegrad::kernels
