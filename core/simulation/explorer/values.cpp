#include "simulation/explorer/values.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "simulation/workload.hpp"

namespace telegrad::explorer {
namespace {

// Half the distance from 1 to the next larger number.
double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::bf16: return 0x1p-8;
    case DType::f16: return 0x1p-11;
    default: return 0x1p-24;
  }
}

// The largest integer up to which the type holds all of them.
std::uint64_t integers_most(DType dtype) {
  switch (dtype) {
    case DType::bf16: return 1U << 8;
    case DType::f16: return 1U << 11;
    default: return 1U << 24;
  }
}

// An f32 as the 16 bits of an f16. Its exponents are few: values beyond them become infinite, small ones lose bits.
std::uint16_t half_of(float value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000U : 0U);
  const float magnitude = std::abs(value);
  if (magnitude == 0.0F) return sign;
  if (!(magnitude < 65520.0F)) return static_cast<std::uint16_t>(sign | 0x7c00U);
  const int exponent = std::max(std::ilogb(magnitude), -14);
  const auto steps = static_cast<unsigned>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  // What rounds up to the next power of two carries into the exponent; below 2^-14 there is no leading bit.
  return static_cast<std::uint16_t>(sign + (static_cast<unsigned>(exponent + 14) << 10) + steps);
}

float float_of(std::uint16_t half) {
  const int exponent = (half >> 10) & 0x1f;
  const float steps = static_cast<float>(half & 0x3ff);
  const float magnitude = exponent == 0      ? std::ldexp(steps, -24)
                          : exponent == 0x1f ? std::numeric_limits<float>::infinity()
                                             : std::ldexp(steps + 1024.0F, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

double reduced(Reduction reduction, double a, double b) {
  switch (reduction) {
    case Reduction::prod: return a * b;
    case Reduction::min: return std::min(a, b);
    case Reduction::max: return std::max(a, b);
    case Reduction::max_abs: return std::abs(a) == std::abs(b) ? std::max(a, b) : std::abs(a) > std::abs(b) ? a : b;
    default: return a + b;
  }
}

// Of a sum, as a share of the sum of magnitudes, whatever the order of additions and wherever each is rounded: Higham,
// "Accuracy and Stability of Numerical Algorithms", SIAM 2002, §4.2. Two roundings more for the mean: 1 / size, and the
// product.
double relative_error_most(DType dtype, Rank size) {
  const double rounding = (static_cast<double>(size) + 1.0) * unit_roundoff(dtype);
  return rounding / (1.0 - rounding);
}

// Scaled as an element of the type would be.
double mean_of(const PlannedCall& call, double sum, Rank size) {
  if (call.reduction != Reduction::avg) return sum;
  if (call.dtype == DType::f64) return sum * (1.0 / static_cast<double>(size));
  return static_cast<double>(static_cast<float>(sum) * (1.0F / static_cast<float>(size)));
}

}  // namespace

float absent_value(Reduction reduction) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  switch (reduction) {
    case Reduction::prod: return 1.0F;
    case Reduction::min: return kInfinity;
    case Reduction::max: return -kInfinity;
    default: return 0.0F;
  }
}

std::size_t put_value(DType dtype, std::byte* to, double value) {
  if (is_integer(dtype)) {  // also of unsigned ones the bits, modulo 2 to their number
    const auto whole = static_cast<std::int64_t>(value);
    std::memcpy(to, &whole, size_of(dtype));
    return size_of(dtype);
  }
  if (dtype == DType::f64) {
    std::memcpy(to, &value, sizeof value);
    return sizeof value;
  }
  const auto single = static_cast<float>(value);
  const auto bits = std::bit_cast<std::uint32_t>(single);
  if (dtype == DType::f32) {
    std::memcpy(to, &bits, sizeof bits);
    return sizeof bits;
  }
  const auto rounded = dtype == DType::f16 ? half_of(single)
                                           : static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
  std::memcpy(to, &rounded, sizeof rounded);
  return sizeof rounded;
}

double value_at(DType dtype, const std::byte* from) {
  if (dtype == DType::f64) {
    double value = 0.0;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  if (dtype == DType::f32) {
    float value = 0.0F;
    std::memcpy(&value, from, sizeof value);
    return static_cast<double>(value);
  }
  std::uint16_t half = 0;
  std::memcpy(&half, from, sizeof half);
  return static_cast<double>(dtype == DType::f16 ? float_of(half)
                                                 : std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16));
}

Contribution::Contribution(const PlannedCall& call, Rank rank, Rank size) {
  Random random(call.seed + 0x1000 * (std::uint64_t{rank} + 1));
  values_ = random.next();
  entries_ = random.next();
  in_place_ = random.below(2) == 0;
  bound_ = std::clamp<std::uint64_t>(integers_most(call.dtype) / size, 1, call.dtype == DType::bf16 ? 7 : 1000);
  constexpr Rank kScalingRanks = 8;
  factors_ = call.reduction == Reduction::prod;
  scales_ = rank < kScalingRanks;
  Random common(call.seed);
  rounded_ = call.rounded;
  mantissa_ = call.dtype == DType::bf16 ? 0x807f0000U : call.dtype == DType::f16 ? 0x807fe000U : 0x807fffffU;
  constexpr std::array<std::uint64_t, 4> kBinades{1, 2, 8, 40};
  const std::uint64_t density = common.next();
  binades_ = kBinades[common.below(call.dtype == DType::f16 ? kBinades.size() - 1 : kBinades.size())];
  if (!call.is_sparse()) return;
  // Most calls have one density for all ranks; in each some ranks have one of their own.
  constexpr std::array kDensities{0.0, 0.002, 0.02, 0.1, 0.5, 1.0};
  const std::uint64_t own = random.below(8);
  density_ = kDensities[(own < 2 ? random.next() : density) % kDensities.size()];
  dense_ = own == 2;
  if (call.operation != Operation::allreduce_topk) return;
  constexpr std::array kCrowds{Crowd::none, Crowd::entries, Crowd::values};
  crowd_ = kCrowds[common.below(kCrowds.size())];
  const std::size_t length = call.count / (2 + common.below(30)) + 1;
  crowd_begin_ = common.below(call.count + 1);
  crowd_end_ = crowd_begin_ + length;
  if (call.entries > 0) train(call, rank, size, common, own);
}

// Most ranks have as many entries as the call says, evenly spread. Or the slice of one rank, as it is cut at first, has all
// of some ranks, and nearly twice its part of others.
void Contribution::train(const PlannedCall& call, Rank rank, Rank size, Random& common, std::uint64_t own) {
  constexpr double kLean = 1.75;  // below 2, with which they would hold their entries back
  const double even = static_cast<double>(call.entries) / static_cast<double>(call.count);
  const std::uint64_t how = common.below(8);
  const std::uint64_t slice = common.below(size);
  const std::uint64_t one = common.below(size);
  if (own != 0 || how == 5) density_ = even;
  dense_ = false;
  crowd_ = how < 7 ? Crowd::none : Crowd::values;
  if (how < 4 || how == 7) return;
  crowd_ = Crowd::entries;
  crowd_begin_ = call.count * slice / size;
  crowd_end_ = call.count * (slice + 1) / size;
  beside_ = density_ * (size - kLean) / (size - 1.0);
  density_ *= kLean;
  if (how == 4) return;
  const bool is_moved = how == 5 ? rank == one : mix(call.seed + rank) % 3 == 0;
  if (!is_moved) return;
  density_ = even * static_cast<double>(size);
  beside_ = 0.0;
}

Expected expected_sum(const PlannedCall& call, Rank size, const std::vector<const PlannedCall*>& by_rank) {
  const bool sparse = call.is_sparse();
  const bool encoded = call.is_encoded();
  const bool rounded =
      encoded || std::ranges::any_of(by_rank, [](const PlannedCall* one) { return one->rounded; });
  double largest = 0.0;
  std::vector<double> sums(call.count, sparse ? static_cast<double>(absent_value(call.reduction)) : 0.0);
  std::vector<double> magnitudes(rounded ? call.count : 0);
  std::vector<char> present(sparse ? call.count : 0);
  for (Rank rank = 0; rank < size; ++rank) {
    const Contribution share(*by_rank[rank], rank, size);
    for (std::size_t i = 0; i < call.count; ++i) {
      if (sparse) {
        if (!share.has(i)) continue;
        present[i] = 1;
      }
      const auto value = static_cast<double>(share.value(i));
      sums[i] = sparse ? reduced(call.reduction, sums[i], value) : sums[i] + value;
      if (rounded) magnitudes[i] += std::abs(value);
      largest = std::max(largest, std::abs(value));
    }
  }
  Expected expected;
  for (std::uint32_t i = 0; i < present.size(); ++i) {
    if (present[i] != 0) expected.indices.push_back(i);
  }
  if (rounded) {
    const double mean = call.reduction == Reduction::avg ? 1.0 / static_cast<double>(size) : 1.0;
    // The sums of doubles are rounded too, a billion times less.
    const double error = relative_error_most(call.dtype, size) * (1.0 + 1e-6) * mean;
    const double encoding = rounding_of(call.wire_values());  // on the way to the owner, and of the sum once more
    for (double& sum : sums) sum *= mean;
    for (double& magnitude : magnitudes) {
      const double scale = has_own_scale(call.wire_values()) ? magnitude : largest * static_cast<double>(size);
      magnitude = magnitude * error + 2.0 * encoding * (1.0 + encoding) * scale * mean;
    }
    expected.sums = std::move(sums);
    expected.errors_most = std::move(magnitudes);
    return expected;
  }
  expected.dense.resize(call.bytes());
  std::byte* next = expected.dense.data();
  for (const double sum : sums) next += put_value(call.dtype, next, mean_of(call, sum, size));
  return expected;
}

Expected expected_vectors(Rank size, const std::vector<const PlannedCall*>& by_rank) {
  Expected expected;
  for (Rank rank = 0; rank < size; ++rank) {
    const PlannedCall& call = *by_rank[rank];
    const Contribution share(call, rank, size);
    for (std::size_t i = 0; i < call.count; ++i) {
      if (!share.has(i)) continue;
      expected.indices.push_back(static_cast<std::uint32_t>(rank * call.count + i));
      expected.dense.resize(expected.dense.size() + size_of(call.dtype));
      (void)put_value(call.dtype, expected.dense.data() + expected.dense.size() - size_of(call.dtype), share.value(i));
    }
  }
  return expected;
}

}  // namespace telegrad::explorer
