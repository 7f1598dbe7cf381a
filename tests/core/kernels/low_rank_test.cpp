#include "kernels/low_rank.hpp"

#include <cmath>
#include <random>
#include <vector>

#include "kernel_samples.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;

TEST("a product of narrow matrices adds its terms in order, each rounded") {
  const std::vector<float> left = {1.0F, 1e8F, 2.0F, -3.0F};  // 2 x 2
  const std::vector<float> right = {1.0F, -1.0F, 0.5F, 1.0F, 0.0F, -2.0F};  // 2 x 3
  std::vector<float> out(6, 7.0F);
  kernels::low_rank_product(left, right, 2, out);
  EXPECT(out == (std::vector<float>{1.0F + 1e8F, -1.0F, 0.5F + -2e8F, -1.0F, -2.0F, 7.0F}));
}

TEST("a product of rank 0 is zero") {
  std::vector<float> out(3, 7.0F);
  kernels::low_rank_product({}, {}, 0, out);
  EXPECT(out == (std::vector<float>{0.0F, 0.0F, 0.0F}));
}

TEST("a product has the same bits at every level") {
  for (const std::size_t rows : {1, 3, 4, 9}) {
    for (const std::size_t columns : {1, 15, 16, 35}) {
      for (const std::size_t rank : {1, 2, 5}) {
        std::vector<float> left(rows * rank), right(rank * columns);
        std::minstd_rand random(7);
        for (float& one : left) one = static_cast<float>(random()) / 1e9F - 1.0F;
        for (float& one : right) one = static_cast<float>(random()) / 1e9F - 1.0F;
        std::vector<float> expected(rows * columns);
        for (std::size_t i = 0; i < rows; ++i)
          for (std::size_t j = 0; j < columns; ++j) {
            float sum = left[i * rank] * right[j];
            for (std::size_t k = 1; k < rank; ++k) sum += left[i * rank + k] * right[k * columns + j];
            expected[i * columns + j] = sum;
          }
        samples::at_every_level([&] {
          std::vector<float> out(rows * columns, 7.0F);
          kernels::low_rank_product(left, right, rank, out);
          EXPECT(out == expected);
        });
      }
    }
  }
}

TEST("a basis is orthonormal, and a column that depends on others is zero") {
  const std::vector<float> columns = {3.0F, 0.0F, 4.0F, 6.0F, 0.0F, 8.0F, 1.0F, 2.0F, 0.0F};  // of 3 rows
  std::vector<float> basis(9, 7.0F);
  kernels::orthonormal_basis(columns, 3, basis);
  const auto product = [&](std::size_t a, std::size_t b) {
    return basis[a] * basis[b] + basis[3 + a] * basis[3 + b] + basis[6 + a] * basis[6 + b];
  };
  EXPECT(basis[0] == 0.6F && basis[3] == 0.0F && basis[6] == 0.8F);
  EXPECT(basis[1] == 0.0F && basis[4] == 0.0F && basis[7] == 0.0F);
  EXPECT(std::abs(product(2, 2) - 1.0F) < 1e-6F && std::abs(product(0, 2)) < 1e-6F);
}

TEST("lengths of columns are squared sums of halves") {
  const std::vector<float> matrix = {1.0F, 2.0F, -3.0F, 4.0F, 5.0F, -6.0F};  // 3 x 2
  std::vector<double> squares(2, 7.0);
  kernels::squared_lengths(matrix, squares);
  EXPECT(squares == (std::vector<double>{35.0, 56.0}));
}

}  // namespace
