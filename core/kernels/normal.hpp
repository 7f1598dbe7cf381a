#pragma once
// What a normal distribution that fits the sums would be: for the estimate of a threshold.

#include <cstddef>
#include <span>

namespace telegrad::kernels {

struct Normal {
  double mean;
  double deviation;  // the square root of the variance (of the entries themselves, not of a population)
};

/// residual += gradient (nothing, if that is empty; CHECKed to have the same length otherwise), and the mean and the
/// standard deviation of the sums, of which there is at least one (CHECKed). Summed as Moments are.
Normal accumulate_normal(std::span<float> residual, std::span<const float> gradient);

namespace reference {
Normal accumulate_normal(std::span<float> residual, std::span<const float> gradient);
}  // namespace reference

}  // namespace telegrad::kernels
