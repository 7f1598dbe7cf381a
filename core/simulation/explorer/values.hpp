#pragma once
// What every rank puts into a call, and what must come out: computed here from the plan alone, with nothing of what it
// checks. Most values are small integers, so that every sum is exact in any order, in bf16 too. Those of rounded calls
// are floats of varied magnitude: their sum depends on the order, so it has a bound of error, and is the same everywhere.

#include <bit>
#include <cstring>
#include <vector>

#include "base/random.hpp"
#include "simulation/explorer/program.hpp"

namespace telegrad::explorer {

/// With more, rounding may eat up all that a sum of bf16 says.
inline constexpr Rank kRoundedRanksMost = 64;

/// The part of `rank` in a call of `size` ranks. Its densities differ from rank to rank.
class Contribution {
 public:
  Contribution(const PlannedCall& call, Rank rank, Rank size);

  /// Element `i` of a vector that is added up; for a sparse one only where has(i).
  float value(std::size_t i) const {
    const std::uint64_t random = mix(values_ + i);
    if (rounded_) return rounded_value(random);
    return static_cast<float>(static_cast<int>(random % (2 * bound_ + 1)) - static_cast<int>(bound_));
  }
  std::byte byte(std::size_t i) const { return static_cast<std::byte>(mix(values_ + i)); }
  /// Sparse: the stream is given densely, entries or not.
  bool dense() const { return dense_; }
  bool has(std::size_t i) const { return dense_ || static_cast<double>(mix(entries_ + i) >> 11) * 0x1p-53 < density_; }
  /// The result goes where the input is (or: is written densely, where it is a sparse one).
  bool in_place() const { return in_place_; }

 private:
  // Any sign and mantissa that the type holds, and one of some exponents; never 0.
  float rounded_value(std::uint64_t random) const {
    const auto exponent = static_cast<std::uint32_t>(127 - binades_ / 2 + (random >> 32) % binades_);
    return std::bit_cast<float>((static_cast<std::uint32_t>(random) & mantissa_) | exponent << 23);
  }

  std::uint64_t values_;
  std::uint64_t entries_;
  std::uint64_t bound_;
  bool rounded_;
  std::uint32_t mantissa_;  // and sign: the bits that the type has
  std::uint64_t binades_;
  double density_ = 0.0;
  bool dense_ = false;
  bool in_place_;
};

/// The result of an allreduce, and of a sparse one with the indices that it has if it is sparse.
struct Expected {
  std::vector<std::byte> dense{};
  std::vector<std::uint32_t> indices{};
  /// Of a rounded call, instead of `dense`: sums in double precision, and how far off an element may be.
  std::vector<double> sums{};
  std::vector<double> errors_most{};
};
Expected expected_sum(const PlannedCall& call, Rank size, const std::vector<const PlannedCall*>& by_rank);

/// An element as it lies in memory.
inline std::size_t put_value(DType dtype, std::byte* to, float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (dtype == DType::f32) {
    std::memcpy(to, &bits, sizeof bits);
    return sizeof bits;
  }
  // To nearest even, as everybody rounds who has no bf16 unit.
  const auto rounded = static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
  std::memcpy(to, &rounded, sizeof rounded);
  return sizeof rounded;
}

/// An f32 or bf16 as it lies in memory.
inline float value_at(DType dtype, const std::byte* from) {
  std::uint32_t bits = 0;
  if (dtype == DType::f32) {
    std::memcpy(&bits, from, sizeof bits);
  } else {
    std::uint16_t half = 0;
    std::memcpy(&half, from, sizeof half);
    bits = static_cast<std::uint32_t>(half) << 16;
  }
  return std::bit_cast<float>(bits);
}

}  // namespace telegrad::explorer
