#include "kernels/low_rank.hpp"

#include <algorithm>

#include "base/check.hpp"

namespace telegrad::kernels {

void low_rank_product(std::span<const float> left, std::span<const float> right, std::size_t rank, std::span<float> out) {
  if (rank == 0) {
    std::ranges::fill(out, 0.0F);
    return;
  }
  TELEGRAD_CHECK(left.size() % rank == 0 && right.size() % rank == 0);
  const std::size_t rows = left.size() / rank, columns = right.size() / rank;
  TELEGRAD_CHECK(out.size() == rows * columns);
  for (std::size_t i = 0; i < rows; ++i) {
    float* const row = out.data() + i * columns;
    const float* const factors = left.data() + i * rank;
    for (std::size_t j = 0; j < columns; ++j) row[j] = factors[0] * right[j];
    for (std::size_t k = 1; k < rank; ++k) {
      const float factor = factors[k];
      const float* const line = right.data() + k * columns;
      for (std::size_t j = 0; j < columns; ++j) row[j] += factor * line[j];
    }
  }
}

}  // namespace telegrad::kernels
