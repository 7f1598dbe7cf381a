#pragma once
// The least value of a quadratic with an L1 penalty, by products with its matrix alone: a step of Newton's method with that
// penalty (proximal Newton; Yuan, Ho and Lin 2012).
//
// Proximal steps, scaled by the diagonal, let variables leave 0. Conjugate gradients then move all that are not 0, as long
// as these keep their signs. If some would change, all of these become 0 at once if that lowers the value enough, else the
// first one (Moré and Toraldo 1991 for bounds; Solntsev, Nocedal and Byrd 2015 for L1).

#include <cstddef>
#include <functional>
#include <span>

namespace telegrad::linear {

/// gradient·d + d·Hd/2 + l1·Σ|z_i|, the latter over the first `penalised` variables; d is how far z is from where it began.
struct Lasso {
  std::span<const double> gradient;
  std::span<const double> diagonal;  // of H, above 0
  double l1 = 0;
  std::size_t penalised = 0;
  /// product = H·direction.
  std::function<void(std::span<const double> direction, std::span<double> product)> multiply;
};

/// x, nearer to 0 by `by`, or 0.
double shrunk(double x, double by);

/// The element of the least subgradient of l1·|z| + …, whose smooth part has this slope.
double least_slope(double z, double slope, double l1);

/// Makes no element of the least subgradient larger than `target`, unless that takes over `most` products. The value
/// never rises, and zeros in the result are exact.
void minimise(const Lasso& problem, double target, std::size_t most, std::span<double> z);

}  // namespace telegrad::linear
