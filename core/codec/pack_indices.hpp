#pragma once
// Strictly increasing indices in few bits, near the entropy of uniform sets and far below raw for clustered ones.
//
// Blocks of at most 1,024 indices stand one behind the other, each with its own first index and width, so that a block
// can be found and read without those before it:
//
//   8 bytes    bits 0–31 first index; 32–41 count − 1; 42 whether runs; 43–47 width; 48–60 bytes of payload; 61–63 zero
//   gaps       the other indices, Golomb–Rice above the first one (gap_code.hpp); no payload where all are consecutive
//   runs       u16 number of runs − 1, then two Elias–Fano sequences over the runs but the first: how many indices of
//              the block come before the run, and how many numbers between the block's first index and the run are not
//              in the block. Low section of the missing, of the present; high section of the present, of the missing.
//
// Uniform indices take about log2(1/d) + 1.6 bits each (the entropy: log2(1/d) + 1.44), long runs 0.06. Where a block
// of 1,024 mixes clusters and deserts, it is halved as long as that saves bytes, down to 64 indices: bytes as Elias–Fano would
// take, which follow from a block's ends, and are no fewer.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/types.hpp"

namespace telegrad::kernels {

inline constexpr std::size_t kPackedBlockMost = 1024;   // indices of one block
inline constexpr std::size_t kPackedBlockLeast = 64;    // but for the last one
inline constexpr std::size_t kPackedHeaderBytes = 8;

/// No `count` indices take more bytes.
constexpr std::size_t packed_size_most(std::size_t count) {
  // A gap's code has width + 2 bits and a share of the section's last byte: 34 bits for the one gap of a block of two.
  return 5 * count + kPackedHeaderBytes * ((count + kPackedBlockMost - 1) / kPackedBlockMost);
}

/// No `count` indices take fewer bytes: they do where all are consecutive.
constexpr std::size_t packed_size_least(std::size_t count) {
  return kPackedHeaderBytes * ((count + kPackedBlockMost - 1) / kPackedBlockMost);
}

/// One block: what its header says, and how long it is.
struct PackedBlock {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  bool runs = false;
  unsigned width = 0;
  std::size_t payload_bytes = 0;

  std::size_t bytes() const { return kPackedHeaderBytes + payload_bytes; }
};

/// How some indices are packed, and into how many bytes.
struct IndexPlan {
  std::vector<PackedBlock> blocks;
  std::size_t bytes = 0;
};

/// Reads the indices once. The plan suits these alone.
IndexPlan plan_indices(std::span<const std::uint32_t> indices);

/// What `count` indices take that are evenly spread over a range: within 1 % that of as many random ones.
std::size_t packed_size_expected(std::uint64_t range_size, std::uint64_t count);

/// Packs strictly increasing indices into the first plan.bytes bytes of `out` (CHECKed that there are so many); where there are more, it
/// may write kEliasFanoSlackBytes of them, too.
void pack_indices(const IndexPlan& plan, std::span<const std::uint32_t> indices, Bytes out);

/// Reads what pack_indices() wrote: all of `packed`, indices.size() indices, strictly increasing. False where the bytes
/// are no such thing: any are safe.
bool unpack_indices(ConstBytes packed, std::span<std::uint32_t> indices);

namespace reference {
void pack_indices(const IndexPlan& plan, std::span<const std::uint32_t> indices, Bytes out);
bool unpack_indices(ConstBytes packed, std::span<std::uint32_t> indices);
}  // namespace reference

}  // namespace telegrad::kernels
