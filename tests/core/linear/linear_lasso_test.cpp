// Quadratics with an L1 penalty: the optimum's conditions, exact zeros, and what limits leave.
#include "linear/lasso.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "testing.hpp"

namespace {

using namespace telegrad::linear;

// H = AᵀA/rows, whose columns have such scales; the last variable has no penalty.
struct Quadratic {
  std::size_t size;
  std::vector<double> hessian, gradient, diagonal, begin;
  std::size_t products = 0;

  Quadratic(std::size_t count, std::size_t rows, double spread, std::uint32_t seed)
      : size(count), hessian(count * count), gradient(count), begin(count) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    std::vector<double> scales(count), row(count);
    for (double& one : scales) one = std::exp(spread * normal(random));
    for (std::size_t r = 0; r < rows; ++r) {
      const double common = normal(random);
      for (std::size_t i = 0; i < count; ++i) row[i] = scales[i] * (normal(random) + common);
      for (std::size_t i = 0; i < count; ++i) {
        for (std::size_t k = 0; k < count; ++k) hessian[i * count + k] += row[i] * row[k] / static_cast<double>(rows);
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      gradient[i] = scales[i] * normal(random);
      begin[i] = i % 3 == 0 ? normal(random) : 0;
      diagonal.push_back(hessian[i * count + i]);
    }
  }

  void multiply(std::span<const double> direction, std::span<double> product) const {
    for (std::size_t i = 0; i < size; ++i) {
      product[i] = 0;
      for (std::size_t k = 0; k < size; ++k) product[i] += hessian[i * size + k] * direction[k];
    }
  }

  Lasso problem(double l1) {
    return {.gradient = gradient, .diagonal = diagonal, .l1 = l1, .penalised = size - 1,
            .multiply = [this](auto direction, auto product) {
              ++products;
              multiply(direction, product);
            }};
  }

  std::vector<double> slopes(const std::vector<double>& z) const {
    std::vector<double> moved(size), found(size);
    for (std::size_t i = 0; i < size; ++i) moved[i] = z[i] - begin[i];
    multiply(moved, found);
    for (std::size_t i = 0; i < size; ++i) found[i] += gradient[i];
    return found;
  }

  double value(const std::vector<double>& z, double l1) const {
    std::vector<double> moved(size), product(size);
    double sum = 0;
    for (std::size_t i = 0; i < size; ++i) moved[i] = z[i] - begin[i];
    multiply(moved, product);
    for (std::size_t i = 0; i < size; ++i) {
      sum += (gradient[i] + product[i] / 2) * moved[i] + (i + 1 < size ? l1 * std::abs(z[i]) : 0);
    }
    return sum;
  }
};

TEST("at the minimum no element of the least subgradient is larger than asked") {
  for (const double spread : {0.0, 1.0, 2.0}) {
    for (const double l1 : {0.01, 0.3, 2.0}) {
      for (const std::uint32_t seed : {1U, 2U, 3U}) {
        Quadratic quadratic(40, 90, spread, seed);
        std::vector<double> z = quadratic.begin;
        minimise(quadratic.problem(l1), 1e-7, 5000, z);
        EXPECT(quadratic.products < 5000);
        const std::vector<double> slopes = quadratic.slopes(z);
        for (std::size_t i = 0; i + 1 < z.size(); ++i) EXPECT(std::abs(least_slope(z[i], slopes[i], l1)) <= 2e-7);
        EXPECT(std::abs(slopes.back()) <= 2e-7);
      }
    }
  }
}

TEST("zeros are exact, and with a large penalty all weights are") {
  Quadratic quadratic(30, 60, 0.5, 4);
  std::vector<double> z = quadratic.begin;
  minimise(quadratic.problem(1e6), 1e-6, 5000, z);
  EXPECT(std::count(z.begin(), z.end(), 0.0) == 29);
  z = quadratic.begin;
  minimise(quadratic.problem(0.5), 1e-6, 5000, z);
  const auto zeros = std::count(z.begin(), z.end(), 0.0);
  EXPECT(zeros > 3 && zeros < 29);
}

TEST("few products never raise the value") {
  for (std::size_t most = 0; most < 40; ++most) {
    Quadratic quadratic(50, 60, 1.5, 5);
    std::vector<double> z = quadratic.begin;
    minimise(quadratic.problem(0.2), 1e-9, most, z);
    EXPECT(quadratic.value(z, 0.2) <= quadratic.value(quadratic.begin, 0.2) + 1e-12);
    EXPECT(quadratic.products <= most + 2);  // a step that has begun ends
  }
}

TEST("variables without curvature are held by the penalty") {
  Quadratic quadratic(10, 20, 0, 6);
  for (std::size_t k = 0; k < 10; ++k) quadratic.hessian[3 * 10 + k] = quadratic.hessian[k * 10 + 3] = 0;
  quadratic.diagonal[3] = 1e-12;
  quadratic.gradient[3] = 0.05;
  std::vector<double> z = quadratic.begin;
  minimise(quadratic.problem(0.1), 1e-9, 1000, z);
  EXPECT(z[3] == 0);
}

}  // namespace
