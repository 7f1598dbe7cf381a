#include "collectives/choice.hpp"

#include <array>
#include <bit>
#include <limits>

namespace telegrad {
namespace {

// Recursive doubling up to so many bytes, the ring above: where the costs in their head comments cross for
// α/β = 10 KB (10 µs at 1 GB/s). The cost is flat there. Numbers that are no power of two pay for fold and unfold.
struct Row {
  Rank most_ranks;
  std::size_t power_of_two_bytes;
  std::size_t other_bytes;
};
constexpr std::size_t operator""_KiB(unsigned long long kib) { return static_cast<std::size_t>(kib) << 10; }
constexpr std::array kAllreduce{
    Row{2, 64_KiB, 0},
    Row{4, 64_KiB, 8_KiB},
    Row{8, 96_KiB, 24_KiB},
    Row{16, 128_KiB, 64_KiB},
    Row{32, 192_KiB, 128_KiB},
    Row{64, 256_KiB, 192_KiB},
    Row{256, 768_KiB, 512_KiB},
    Row{std::numeric_limits<Rank>::max(), 4096_KiB, 3072_KiB},
};

}  // namespace

Algorithm choose_allreduce(Rank size, std::size_t bytes) {
  for (const Row& row : kAllreduce) {
    if (size > row.most_ranks) continue;
    const std::size_t most = std::has_single_bit(size) ? row.power_of_two_bytes : row.other_bytes;
    return bytes <= most ? Algorithm::recursive_doubling : Algorithm::ring;
  }
  return Algorithm::ring;
}

}  // namespace telegrad
