#include "collectives/choice.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

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

AllreduceTable::AllreduceTable(Rank size, std::vector<AllreduceChoice> choices)
    : size_(size), choices_(std::move(choices)) {
  if (choices_.empty() || choices_.front().from_bytes != 0) {
    throw std::invalid_argument("the table has no choice from 0 bytes: give the first choice from_bytes=0");
  }
  const auto no_more = [](const AllreduceChoice& one, const AllreduceChoice& next) {
    return next.from_bytes <= one.from_bytes;
  };
  const auto stuck = std::ranges::adjacent_find(choices_, no_more);
  if (stuck != choices_.end()) {
    throw std::invalid_argument("the table's choices do not ascend after " + std::to_string(stuck->from_bytes) +
                                " bytes: sort them by from_bytes, each once");
  }
  for (const AllreduceChoice& choice : choices_) {
    if (std::ranges::find(kAllreduceAlgorithms, choice.algorithm) == kAllreduceAlgorithms.end()) {
      throw std::invalid_argument(std::string("the table names ") + name_of(choice.algorithm) +
                                  ", which does not sum dense vectors");
    }
  }
}

Algorithm AllreduceTable::choose(std::size_t bytes) const {
  if (choices_.empty()) return choose_allreduce(size_, bytes);
  const auto after = std::ranges::upper_bound(choices_, bytes, {}, &AllreduceChoice::from_bytes);
  return std::prev(after)->algorithm;
}

}  // namespace telegrad
