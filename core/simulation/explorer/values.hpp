#pragma once
// What every rank puts into a call, and what must come out: computed here from the plan alone, with nothing of what it
// checks. All values are small integers, so that every sum is exact in any order, in bf16 too.

#include <bit>
#include <cstring>
#include <vector>

#include "base/random.hpp"
#include "simulation/explorer/program.hpp"

namespace telegrad::explorer {

/// The part of `rank` in a call of `size` ranks. Its densities differ from rank to rank.
class Contribution {
 public:
  Contribution(const PlannedCall& call, Rank rank, Rank size);

  /// Element `i` of a vector that is added up; for a sparse one only where has(i).
  int value(std::size_t i) const { return static_cast<int>(mix(values_ + i) % (2 * bound_ + 1)) - static_cast<int>(bound_); }
  std::byte byte(std::size_t i) const { return static_cast<std::byte>(mix(values_ + i)); }
  /// Sparse: the stream is given densely, entries or not.
  bool dense() const { return dense_; }
  bool has(std::size_t i) const { return dense_ || static_cast<double>(mix(entries_ + i) >> 11) * 0x1p-53 < density_; }
  /// The result goes where the input is (or: is written densely, where it is a sparse one).
  bool in_place() const { return in_place_; }

 private:
  std::uint64_t values_;
  std::uint64_t entries_;
  std::uint64_t bound_;
  double density_ = 0.0;
  bool dense_ = false;
  bool in_place_;
};

/// The result of an allreduce, and of a sparse one with the indices that it has if it is sparse.
struct Expected {
  std::vector<std::byte> dense;
  std::vector<std::uint32_t> indices;
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

}  // namespace telegrad::explorer
