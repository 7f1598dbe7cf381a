#pragma once
// What every rank puts into a call, and what must come out: computed here from the plan alone, with nothing of what it
// checks. Most values are small integers, so that every sum is exact in any order, in bf16 too; those of products are
// powers of two. Those of rounded calls are floats of varied magnitude: their sum depends on the order, so it has a bound of error, and is the same everywhere.

#include <array>
#include <bit>
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
    if (factors_) return factor(random);
    if (crowd_ == Crowd::values && !is_in_crowd(i)) return static_cast<float>(random % 3) - 1.0F;
    return static_cast<float>(static_cast<int>(random % (2 * bound_ + 1)) - static_cast<int>(bound_));
  }
  std::byte byte(std::size_t i) const { return static_cast<std::byte>(mix(values_ + i)); }
  /// Sparse: the vector is given densely, entries or not.
  bool dense() const { return dense_; }
  bool has(std::size_t i) const {
    const double drawn = static_cast<double>(mix(entries_ + i) >> 11) * 0x1p-53;
    if (crowd_ == Crowd::entries && !is_in_crowd(i)) return drawn < beside_;
    return dense_ || drawn < density_;
  }
  /// The result goes where the input is (or: is written densely, where it is a sparse one).
  bool in_place() const { return in_place_; }

 private:
  // Of a sum of which a part is kept: all entries, or all that are large, may lie in one place, in every call another. So
  // what the last call has left (slices, a threshold) may not fit at all.
  enum class Crowd : std::uint8_t { none, entries, values };
  void train(const PlannedCall& call, Rank rank, Rank size, Random& common, std::uint64_t own);
  bool is_in_crowd(std::size_t i) const { return i >= crowd_begin_ && i < crowd_end_; }

  // Any sign and mantissa that the type holds, and one of some exponents; never 0.
  float rounded_value(std::uint64_t random) const {
    const auto exponent = static_cast<std::uint32_t>(127 - binades_ / 2 + (random >> 32) % binades_);
    return std::bit_cast<float>((static_cast<std::uint32_t>(random) & mantissa_) | exponent << 23);
  }

  // ±1, or of few ranks also twice and half: no product leaves the range of any type.
  float factor(std::uint64_t random) const {
    constexpr std::array kSizes{0.5F, 1.0F, 2.0F};
    return (random & 1 ? -1.0F : 1.0F) * (scales_ ? kSizes[(random >> 32) % kSizes.size()] : 1.0F);
  }

  std::uint64_t values_;
  std::uint64_t entries_;
  std::uint64_t bound_;
  bool factors_;  // of a product
  bool scales_;
  bool rounded_;
  std::uint32_t mantissa_;  // and sign: the bits that the type has
  std::uint64_t binades_;
  double density_ = 0.0;
  double beside_ = 0.0;  // where entries lie in one place, all or most: the density of others
  bool dense_ = false;
  bool in_place_;
  Crowd crowd_ = Crowd::none;
  std::size_t crowd_begin_ = 0;
  std::size_t crowd_end_ = 0;
};

/// Where a dense result has no entry of any rank.
float absent_value(Reduction reduction);

/// The result of an allreduce, and of a sparse one with the indices that it has if it is sparse.
struct Expected {
  std::vector<std::byte> dense{};
  std::vector<std::uint32_t> indices{};
  /// Of a rounded call, instead of `dense`: sums in double precision, and how far off an element may be.
  std::vector<double> sums{};
  std::vector<double> errors_most{};
};
Expected expected_sum(const PlannedCall& call, Rank size, const std::vector<const PlannedCall*>& by_rank);
/// Of a sparse allgather: all ranks' entries, one rank's behind another's, rank r's element i at index r·count + i; in
/// `dense` their values, without what is between.
Expected expected_vectors(Rank size, const std::vector<const PlannedCall*>& by_rank);

/// An f32, f64, bf16 or f16 as it lies in memory, rounded to nearest even, or an integer; returns its bytes.
std::size_t put_value(DType dtype, std::byte* to, double value);
/// The reverse, of floats.
double value_at(DType dtype, const std::byte* from);

}  // namespace telegrad::explorer
