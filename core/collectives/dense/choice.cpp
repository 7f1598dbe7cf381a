#include "collectives/dense/choice.hpp"

#include <algorithm>
#include <bit>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

namespace telegrad {
namespace {

constexpr std::size_t operator""_KiB(unsigned long long kib) { return static_cast<std::size_t>(kib) << 10; }

// Where the costs in the algorithms' head comments cross for α/β = 10 KB (10 µs at 1 GB/s), and where they did among 2 to
// 8 ranks over shared memory and TCP. Rabenseifner's halving sends no more than the ring in fewer steps, but both ways
// between the same two ranks, which a real network may carry more slowly: once the ring's messages are long, it is safer.
constexpr std::size_t kRingMessageBytes = 128_KiB;

std::size_t doubling_bytes_most(Rank size) {
  if (!std::has_single_bit(size)) return 8_KiB;  // pays for fold and unfold
  return std::max(16_KiB, 128_KiB / size);
}

}  // namespace

bool mpi_reduces(DType dtype, Reduction reduction) {
  switch (dtype) {
    case DType::f32:
    case DType::f64: return reduction == Reduction::sum || reduction == Reduction::avg || reduction == Reduction::prod;
    case DType::i8:
    case DType::i16:
    case DType::i32:
    case DType::i64:
    case DType::u8:
    case DType::u16:
    case DType::u32:
    case DType::u64:
      return reduction == Reduction::sum || reduction == Reduction::prod || reduction == Reduction::min ||
             reduction == Reduction::max;
    default: return false;
  }
}

Algorithm choose_allreduce(Rank size, std::size_t bytes) {
  if (bytes <= doubling_bytes_most(size)) return Algorithm::recursive_doubling;
  return bytes < kRingMessageBytes * size ? Algorithm::rabenseifner : Algorithm::ring;
}

// Between two both directions carry the same whatever the algorithm, and halving's short messages do best where two send to
// each other at once.
Algorithm choose_between(Rank size, std::size_t bytes) {
  const Algorithm chosen = choose_allreduce(size, bytes);
  return size == 2 && chosen == Algorithm::ring ? Algorithm::rabenseifner : chosen;
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
    const bool flat = std::ranges::find(kAllreduceAlgorithms, choice.algorithm) != kAllreduceAlgorithms.end();
    if (!flat && choice.algorithm != Algorithm::two_level && choice.algorithm != Algorithm::mpi) {
      throw std::invalid_argument(std::string("the table names ") + name_of(choice.algorithm) +
                                  ", which does not sum dense vectors");
    }
  }
}

// Where nothing is known of the nodes but that there are some: long vectors gain by sending less between them, and of short
// ones the steps count.
Algorithm AllreduceTable::choose(std::size_t bytes, bool by_network) const {
  if (!two_levels_) return choose_flat(bytes, by_network);
  if (choices_.empty()) return bytes > doubling_bytes_most(size_) ? Algorithm::two_level : choose_flat(bytes);
  const auto after = std::ranges::upper_bound(choices_, bytes, {}, &AllreduceChoice::from_bytes);
  const Algorithm algorithm = std::prev(after)->algorithm;
  if (algorithm != Algorithm::mpi || (by_network && network_sums_)) return algorithm;
  return bytes > doubling_bytes_most(size_) ? Algorithm::two_level : choose_allreduce(size_, bytes);
}

Algorithm AllreduceTable::choose_flat(std::size_t bytes, bool by_network) const {
  if (choices_.empty()) return choose_allreduce(size_, bytes);
  const auto after = std::ranges::upper_bound(choices_, bytes, {}, &AllreduceChoice::from_bytes);
  const Algorithm algorithm = std::prev(after)->algorithm;
  const bool fits = algorithm == Algorithm::mpi ? by_network && network_sums_ : algorithm != Algorithm::two_level;
  return fits ? algorithm : choose_allreduce(size_, bytes);
}

}  // namespace telegrad
