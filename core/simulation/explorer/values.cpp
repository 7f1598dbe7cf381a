#include "simulation/explorer/values.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace telegrad::explorer {
namespace {

// Half the distance from 1 to the next larger number.
double unit_roundoff(DType dtype) { return dtype == DType::bf16 ? 0x1p-8 : 0x1p-24; }

// Of a sum, as a share of the sum of magnitudes, whatever the order of additions and wherever each is rounded: Higham,
// "Accuracy and Stability of Numerical Algorithms", SIAM 2002, §4.2. Two roundings more for the mean: 1 / size, and the
// product.
double relative_error_most(DType dtype, Rank size) {
  const double rounding = (static_cast<double>(size) + 1.0) * unit_roundoff(dtype);
  return rounding / (1.0 - rounding);
}

}  // namespace

Contribution::Contribution(const PlannedCall& call, Rank rank, Rank size) {
  Random random(call.seed + 0x1000 * (std::uint64_t{rank} + 1));
  values_ = random.next();
  entries_ = random.next();
  in_place_ = random.below(2) == 0;
  // bf16 holds every integer up to 256, f32 up to 2^24.
  bound_ = call.dtype == DType::bf16 ? std::clamp<std::uint64_t>(256 / size, 1, 7) : 1000;
  Random common(call.seed);
  rounded_ = call.rounded;
  mantissa_ = call.dtype == DType::bf16 ? 0x807f0000U : 0x807fffffU;
  constexpr std::array<std::uint64_t, 4> kBinades{1, 2, 8, 40};
  const std::uint64_t density = common.next();
  binades_ = kBinades[common.below(kBinades.size())];
  if (call.operation != Operation::sparse_allreduce) return;
  // Most calls have one density for all ranks; in each some ranks have one of their own.
  constexpr std::array kDensities{0.0, 0.002, 0.02, 0.1, 0.5, 1.0};
  const std::uint64_t own = random.below(8);
  density_ = kDensities[(own < 2 ? random.next() : density) % kDensities.size()];
  dense_ = own == 2;
}

Expected expected_sum(const PlannedCall& call, Rank size, const std::vector<const PlannedCall*>& by_rank) {
  const bool sparse = call.operation == Operation::sparse_allreduce;
  const bool rounded = std::ranges::any_of(by_rank, [](const PlannedCall* one) { return one->rounded; });
  std::vector<double> sums(call.count);
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
      sums[i] += value;
      if (rounded) magnitudes[i] += std::abs(value);
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
    for (double& sum : sums) sum *= mean;
    for (double& magnitude : magnitudes) magnitude *= error;
    expected.sums = std::move(sums);
    expected.errors_most = std::move(magnitudes);
    return expected;
  }
  expected.dense.resize(call.bytes());
  const float factor = call.reduction == Reduction::avg ? 1.0F / static_cast<float>(size) : 1.0F;
  std::byte* next = expected.dense.data();
  for (const double sum : sums) next += put_value(call.dtype, next, static_cast<float>(sum) * factor);
  return expected;
}

}  // namespace telegrad::explorer
