#include "kernels/low_rank.hpp"

#include <vector>

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

}  // namespace
