#include "linear/lasso.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.hpp"

namespace telegrad::linear {
namespace {

class Minimiser {
 public:
  Minimiser(const Lasso& problem, double target, std::size_t most, std::span<double> z)
      : problem_(problem), target_(target), most_(most), z_(z), size_(z.size()) {
    for (std::vector<double>* one : {&slope_, &step_, &product_, &along_, &curved_, &residual_}) one->resize(size_);
    next_.resize(size_);
    std::copy(problem.gradient.begin(), problem.gradient.end(), slope_.begin());
  }

  void run() {
    while (products_ < most_ && worst() > target_) {
      release();
      descend();
    }
  }

 private:
  bool is_free(std::size_t i) const { return i >= problem_.penalised || z_[i] != 0; }

  // Of the value's part that is linear on this side of 0.
  double slope_of_face(std::size_t i) const {
    return slope_[i] + (i < problem_.penalised ? std::copysign(problem_.l1, z_[i]) : 0);
  }

  double worst() const {
    double found = 0;
    for (std::size_t i = 0; i < size_; ++i) {
      const double one = i < problem_.penalised ? least_slope(z_[i], slope_[i], problem_.l1) : slope_[i];
      found = std::max(found, std::abs(one));
    }
    return found;
  }

  void multiply(const std::vector<double>& direction, std::vector<double>& product) {
    problem_.multiply(direction, product);
    ++products_;
  }

  double inner(const std::vector<double>& one, const std::vector<double>& other) const {
    double sum = 0;
    for (std::size_t i = 0; i < size_; ++i) sum += one[i] * other[i];
    return sum;
  }

  // z += part·step, and to next_ itself where the step is whole, so that zeros are exact.
  void take(double part) {
    for (std::size_t i = 0; i < size_; ++i) {
      z_[i] = part == 1 ? next_[i] : z_[i] + part * step_[i];
      slope_[i] += part * product_[i];
    }
  }

  // A proximal step, as long as is best on its way: the value is convex there.
  void release() {
    double linear = 0, square = 0;
    for (std::size_t i = 0; i < size_; ++i) {
      const double scale = strength_ * problem_.diagonal[i], wanted = z_[i] - slope_[i] / scale;
      next_[i] = i < problem_.penalised ? shrunk(wanted, problem_.l1 / scale) : wanted;
      step_[i] = next_[i] - z_[i];
      linear += slope_[i] * step_[i];
      if (i < problem_.penalised) linear += problem_.l1 * (std::abs(next_[i]) - std::abs(z_[i]));
      square += problem_.diagonal[i] * step_[i] * step_[i];
    }
    multiply(step_, product_);
    const double curved = inner(step_, product_);
    const double part = curved > 0 ? std::min(1.0, -linear / curved) : 1;
    if (!(linear < 0)) return;
    take(part);
    strength_ = std::max({strength_ / 2, curved / square, kLeastStrength});
  }

  // Conjugate gradients on the variables that are not 0, until they meet `target` or matter less than those at 0.
  void descend() {
    double linear = 0, product = 0;
    std::fill(step_.begin(), step_.end(), 0.0);
    std::fill(product_.begin(), product_.end(), 0.0);
    for (std::size_t i = 0; i < size_; ++i) {
      residual_[i] = is_free(i) ? -slope_of_face(i) : 0;
      along_[i] = residual_[i] / problem_.diagonal[i];
      product += residual_[i] * along_[i];
    }
    bool crosses = false;
    double first = 0;
    for (const double one : residual_) first = std::max(first, std::abs(one));
    while (products_ < most_ && product > 0) {
      multiply(along_, curved_);
      const double curvature = inner(along_, curved_);
      if (!(curvature > 0)) break;
      const double length = product / curvature;
      double face = 0, outside = 0, sum = 0;
      crosses = false;
      for (std::size_t i = 0; i < size_; ++i) {
        product_[i] += length * curved_[i];
        if (!is_free(i)) {
          outside = std::max(outside, std::abs(shrunk(slope_[i] + product_[i], problem_.l1)));
          continue;
        }
        step_[i] += length * along_[i];
        residual_[i] -= length * curved_[i];
        face = std::max(face, std::abs(residual_[i]));
        sum += residual_[i] * residual_[i] / problem_.diagonal[i];
        if (i < problem_.penalised && z_[i] * (z_[i] + step_[i]) < 0) crosses = true;
      }
      if (face <= std::max({target_, kOfOthers * outside, crosses ? kOfFirst * first : 0})) break;
      for (std::size_t i = 0; i < size_; ++i) {
        if (is_free(i)) along_[i] = residual_[i] / problem_.diagonal[i] + sum / product * along_[i];
      }
      product = sum;
    }
    for (std::size_t i = 0; i < size_; ++i) {
      next_[i] = z_[i] + step_[i];
      if (is_free(i)) linear += slope_of_face(i) * step_[i];
    }
    if (!crosses) {
      if (linear + inner(step_, product_) / 2 < 0) take(1);
      return;
    }
    leave(linear);
  }

  // Of steps beyond 0 the part up to it: of each variable its own, or of all that of the first.
  void leave(double linear) {
    double part = 1, other = 0;
    for (std::size_t i = 0; i < problem_.penalised; ++i) {
      if (z_[i] * next_[i] < 0) part = std::min(part, -z_[i] / step_[i]);
    }
    const double fall = -(part * linear + part * part / 2 * inner(step_, product_));
    std::swap(step_, along_);  // the clipped step, and below the whole one again
    for (std::size_t i = 0; i < size_; ++i) {
      const bool beyond = i < problem_.penalised && z_[i] * next_[i] < 0;
      step_[i] = beyond ? -z_[i] : along_[i];
      if (is_free(i)) other += slope_of_face(i) * step_[i];
    }
    multiply(step_, curved_);
    const double clipped = -(other + inner(step_, curved_) / 2);
    if (clipped >= fall) {
      for (std::size_t i = 0; i < size_; ++i) next_[i] = step_[i] == -z_[i] ? 0 : z_[i] + step_[i];
      std::swap(product_, curved_);
      take(1);
      return;
    }
    std::swap(step_, along_);
    for (std::size_t i = 0; i < size_; ++i) {
      const bool is_first = i < problem_.penalised && z_[i] * next_[i] < 0 && -z_[i] / step_[i] <= part;
      z_[i] = is_first ? 0 : z_[i] + part * step_[i];
      slope_[i] += part * product_[i];
    }
  }

  static constexpr double kLeastStrength = 1e-3;
  static constexpr double kOfOthers = 0.5;  // conjugate gradients end where those at 0 have so much larger slopes

  static constexpr double kOfFirst = 0.3;   // of the slopes is near enough where some would change signs

  const Lasso& problem_;
  const double target_;
  const std::size_t most_;
  std::span<double> z_;
  const std::size_t size_;
  std::size_t products_ = 0;
  double strength_ = 1;  // times the diagonal bounds H along proximal steps
  std::vector<double> slope_, step_, product_, along_, curved_, residual_, next_;
};

}  // namespace

double shrunk(double x, double by) {
  return x > by ? x - by : x < -by ? x + by : 0;
}

double least_slope(double z, double slope, double l1) {
  return z > 0 ? slope + l1 : z < 0 ? slope - l1 : shrunk(slope, l1);
}

void minimise(const Lasso& problem, double target, std::size_t most, std::span<double> z) {
  TELEGRAD_CHECK(problem.gradient.size() == z.size() && problem.penalised <= z.size());
  Minimiser(problem, target, most, z).run();
}

}  // namespace telegrad::linear
