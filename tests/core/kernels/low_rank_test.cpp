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

// Whole numbers, of which sums and products are exact whatever the order.
std::vector<float> whole(std::size_t count, unsigned seed) {
  std::minstd_rand random(seed);
  std::vector<float> made(count);
  for (float& one : made) one = static_cast<float>(random() % 9) - 4.0F;
  return made;
}

template <class Do>
void with_all_sizes(const Do& act) {
  for (const std::size_t rows : {1, 3, 4, 11})
    for (const std::size_t columns : {1, 15, 16, 35, 2085})
      for (const std::size_t rank : {1, 2, 5}) samples::at_every_level([&] { act(rows, columns, rank); });
}

TEST("a sum is made and multiplied by lines") {
  with_all_sizes([](std::size_t rows, std::size_t columns, std::size_t rank) {
    const std::vector<float> before = whole(rows * columns, 1), added = whole(rows * columns, 2);
    const std::vector<float> lines = whole(rank * columns, 3);
    std::vector<float> sum(rows * columns, 7.0F), out(rank * rows, 7.0F), expected(rank * rows);
    double squares = 0;
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t j = 0; j < columns; ++j) {
        const float one = before[i * columns + j] + added[i * columns + j];
        squares += one * one;
        for (std::size_t k = 0; k < rank; ++k) expected[k * rows + i] += one * lines[k * columns + j];
      }
    EXPECT(kernels::add_and_multiply(before, added, lines, rank, sum, out) == squares);
    EXPECT(out == expected);
    for (std::size_t at = 0; at < sum.size(); ++at) EXPECT(sum[at] == before[at] + added[at]);
    std::vector<float> in_place = before;
    EXPECT(kernels::add_and_multiply(in_place, added, lines, rank, in_place, out) == squares);
    EXPECT(in_place == sum && out == expected);
  });
}

TEST("a matrix is multiplied by transposed columns") {
  with_all_sizes([](std::size_t rows, std::size_t columns, std::size_t rank) {
    const std::vector<float> left = whole(rows * rank, 1), matrix = whole(rows * columns, 2);
    std::vector<float> out(rank * columns, 7.0F), expected(rank * columns);
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t k = 0; k < rank; ++k)
        for (std::size_t j = 0; j < columns; ++j)
          expected[k * columns + j] += left[i * rank + k] * matrix[i * columns + j];
    kernels::multiply_transposed(left, matrix, rank, out);
    EXPECT(out == expected);
  });
}

TEST("a product is taken off a matrix, with the bits of a product") {
  with_all_sizes([](std::size_t rows, std::size_t columns, std::size_t rank) {
    std::vector<float> left = whole(rows * rank, 1), right = whole(rank * columns, 2);
    for (float& one : left) one *= 0.1F;
    std::vector<float> matrix = whole(rows * columns, 3), expected = matrix, product(rows * columns);
    kernels::low_rank_product(left, right, rank, product);
    for (std::size_t at = 0; at < matrix.size(); ++at) expected[at] -= product[at];
    double squares = 0;
    for (const float one : expected) squares += static_cast<double>(one) * static_cast<double>(one);
    const double found = kernels::subtract_product(left, right, rank, matrix);
    EXPECT(matrix == expected);
    EXPECT(std::abs(found - squares) <= 1e-5 * squares);
  });
}

TEST("sums of rounded numbers have the same bits at every level") {
  const std::size_t rows = 37, columns = 2100, rank = 6;
  std::vector<float> before(rows * columns), lines(rank * columns), left(rows * rank);
  std::minstd_rand random(7);
  for (auto* const each : {&before, &lines, &left})
    for (float& one : *each) one = static_cast<float>(random()) / 1e9F - 1.0F;
  std::vector<std::vector<float>> sums, products, rests;
  samples::at_every_level([&] {
    std::vector<float> sum(rows * columns), out(rank * rows), transposed(rank * columns);
    kernels::add_and_multiply(before, before, lines, rank, sum, out);
    kernels::multiply_transposed(left, sum, rank, transposed);
    kernels::subtract_product(left, lines, rank, sum);
    sums.push_back(out);
    products.push_back(transposed);
    rests.push_back(sum);
  });
  for (std::size_t level = 1; level < sums.size(); ++level) {
    EXPECT(sums[level] == sums[0] && products[level] == products[0] && rests[level] == rests[0]);
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
