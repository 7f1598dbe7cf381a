#include "kernels/cut.hpp"

#include <algorithm>
#include <cmath>

#include "kernel_samples.hpp"
#include "kernels/scan_keys.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using kernels::Cut;
using kernels::Side;
using samples::Guarded;

constexpr Side kSides[] = {Side::both, Side::positive, Side::negative};

TEST("counting and collecting keys have the results of the reference at every level") {
  std::mt19937 random(1);
  for (const std::size_t size : samples::kSizes) {
    const auto x = samples::awkward_values<float>(random, size);
    for (const Side side : kSides) {
      for (const auto& [first, last] :
           {std::pair{0.0F, 0.0F}, {0.0F, 1.0F}, {0.3F, 0.9F}, {1.0F, 1.0F}, {0.0F, INFINITY}, {1e-40F, 1e30F}}) {
        const auto low = std::bit_cast<std::int32_t>(first), high = std::bit_cast<std::int32_t>(last);
        const std::size_t count = kernels::reference::count_at_least(x, low, side);
        std::vector<std::int32_t> expected(size + kernels::kCollectSlack), keys = expected;
        const std::size_t collected = kernels::reference::collect_keys(x, low, high, side, expected, size);
        samples::at_every_level([&] {
          Guarded<float> guarded(x, 4);
          EXPECT_EQ(kernels::count_at_least(guarded.span(), low, side), count);
          EXPECT_EQ(kernels::collect_keys(guarded.span(), low, high, side, keys, size), collected);
          EXPECT(std::equal(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(collected), expected.begin()));
          if (collected > 0) {  // it stops soon where there are too many
            const std::size_t most = collected / 2;
            Guarded<std::int32_t> few(most + kernels::kCollectSlack);
            EXPECT(kernels::collect_keys(guarded.span(), low, high, side, few.span(), most) > most);
            EXPECT(few.intact());
          }
        });
      }
    }
  }
}

void expect_cut(const std::vector<float>& x, std::size_t k) {
  Guarded<float> guarded(x, 4);
  for (const Side side : kSides) {
    const Cut expected = kernels::reference::topk_cut(guarded.span(), k, side);
    std::vector<float> left = x, values(x.size());
    std::vector<std::uint32_t> indices(x.size());
    const std::size_t moved = kernels::reference::move_cut(left, expected, side, 5, {indices, values});
    EXPECT(side == Side::both ? moved == k : moved <= k);
    indices.resize(moved);
    values.resize(moved);
    samples::at_every_level([&] {
      EXPECT(kernels::topk_cut(guarded.span(), k, side) == expected);
      Guarded<float> rest(x, 8), own_values(moved);
      Guarded<std::uint32_t> own_indices(moved);
      EXPECT_EQ(kernels::move_cut(rest.span(), expected, side, 5, {own_indices.span(), own_values.span()}), moved);
      EXPECT(rest.intact() && own_values.intact() && own_indices.intact());
      EXPECT(own_indices.copy() == indices);
      EXPECT_EQ(samples::bits(own_values.copy()), samples::bits(values));
      EXPECT_EQ(samples::bits(rest.copy()), samples::bits(left));
    });
  }
}

TEST("a cut selects exactly the k largest, ties to the lowest index") {
  std::mt19937 random(6);
  for (const std::size_t size : samples::kSizes) {
    const auto x = samples::awkward_values<float>(random, size);
    for (const std::size_t k : {std::size_t{0}, std::size_t{1}, size / 100, size / 4, size / 2, size - 1, size}) {
      if (k <= size) expect_cut(x, k);
    }
  }
  for (const std::size_t k : {1, 2, 3, 4, 5}) expect_cut({1.0F, -2.0F, -1.0F, 1.0F, 2.0F}, k);
}

TEST("a cut is exact on long inputs with many ties") {
  std::mt19937 random(7);
  const std::size_t size = 20'003;
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> inputs(4, std::vector<float>(size));
  for (float& value : inputs[0]) value = normal(random) * 1e-4F;
  for (float& value : inputs[1]) value = -0.5F;
  for (std::size_t i = 0; i < size; i += 1000) inputs[2][i] = normal(random);
  for (float& value : inputs[3]) value = static_cast<float>(random() % 3);
  for (const auto& x : inputs) {
    for (const std::size_t k : {std::size_t{1}, size / 1000, size / 10, size / 2, size}) expect_cut(x, k);
  }
}

}  // namespace
