#include "collectives/sparse/growth.hpp"

#include <algorithm>
#include <cmath>

namespace telegrad {

SumGrowth::SumGrowth(std::uint64_t dimension, double entries, double overlap)
    : dimension_(static_cast<double>(dimension)) {
  const double common = overlap * entries;
  elsewhere_ = std::max(0.0, dimension_ - common);
  missing_ = elsewhere_ > 0.0 ? std::clamp(1.0 - (entries - common) / elsewhere_, 0.0, 1.0) : 0.0;
}

SumGrowth SumGrowth::seen(std::uint64_t dimension, double half, double full, unsigned doublings) {
  SumGrowth growth;
  growth.dimension_ = static_cast<double>(dimension);
  const double missing_in_half = growth.dimension_ - half;
  const double missing_in_full = growth.dimension_ - full;
  if (missing_in_half <= 0.0 || missing_in_full <= 0.0) {
    growth.elsewhere_ = growth.dimension_;
    growth.missing_ = 0.0;
    return growth;
  }
  // (N − C)·q^m and its half: their ratio is q^(m/2).
  double missing = std::min(1.0, missing_in_full / missing_in_half);
  growth.elsewhere_ = missing_in_half / missing;
  unsigned roots = doublings - 1;
  if (growth.elsewhere_ > growth.dimension_) {  // fewer in common than independent ones have
    growth.elsewhere_ = growth.dimension_;
    missing = missing_in_full / growth.dimension_;
    roots = doublings;
  }
  for (; roots > 0; --roots) missing = std::sqrt(missing);
  growth.missing_ = missing;
  return growth;
}

double SumGrowth::entries(double streams) const {
  return std::max(0.0, dimension_ - elsewhere_ * std::pow(missing_, streams));
}

double SumGrowth::entries_doubled(unsigned doublings) const {
  const SumGrowth sums = of_sums_doubled(doublings);
  return std::max(0.0, dimension_ - elsewhere_ * sums.missing_);
}

SumGrowth SumGrowth::of_sums_doubled(unsigned doublings) const {
  SumGrowth growth = *this;
  for (; doublings > 0; --doublings) growth.missing_ *= growth.missing_;
  return growth;
}

SumGrowth SumGrowth::of_slice(double slices) const {
  SumGrowth growth = *this;
  growth.dimension_ /= slices;
  growth.elsewhere_ /= slices;
  return growth;
}

SumGrowth SumGrowth::of_sums(double streams) const {
  SumGrowth growth = *this;
  growth.missing_ = std::pow(missing_, streams);
  return growth;
}

double overlap_of(std::uint64_t dimension, double entries, Rank ranks, double sum_entries) {
  constexpr int kHalvings = 40;
  double least = 0.0;
  double most = 1.0;
  const auto more_than_seen = [&](double overlap) {
    return SumGrowth(dimension, entries, overlap).entries(ranks) > sum_entries;
  };
  if (!more_than_seen(least)) return least;
  for (int i = 0; i < kHalvings; ++i) {
    const double middle = (least + most) / 2.0;
    (more_than_seen(middle) ? least : most) = middle;
  }
  return most;
}

}  // namespace telegrad
