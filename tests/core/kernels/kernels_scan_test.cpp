#include "kernels/scan.hpp"

#include "kernel_samples.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using samples::Guarded;

TEST("non-finite numbers are counted, those outside the span are not") {
  std::mt19937 random(3);
  const auto check = [&]<class V>(V, std::size_t size, std::size_t shift) {
    Guarded<V> values(samples::awkward_values<V>(random, size), shift);
    const std::size_t expected = kernels::reference::count_nonfinite(dtype_of<V>, values.bytes());
    samples::at_every_level([&] { EXPECT_EQ(kernels::count_nonfinite(dtype_of<V>, values.bytes()), expected); });
  };
  for (const std::size_t size : samples::kSizes) {
    for (const std::size_t shift : {0, 1, 6, 20}) {
      check(float{}, size, shift);
      check(bf16{}, size, shift);
    }
  }
}

TEST("one NaN is found wherever it is") {
  samples::at_every_level([] {
    for (std::size_t at = 0; at < 200; ++at) {
      std::vector<float> values(200, 1.0F);
      values[at] = std::bit_cast<float>(0x7fc00000U);
      EXPECT_EQ(kernels::count_nonfinite(DType::f32, std::as_bytes(std::span(values))), 1);
      std::vector<bf16> halves(200, bf16(1.0F));
      halves[at] = std::bit_cast<bf16>(std::uint16_t{0xff80});
      EXPECT_EQ(kernels::count_nonfinite(DType::bf16, std::as_bytes(std::span(halves))), 1);
    }
  });
}

TEST("order is judged by unsigned comparison, and a break is found wherever it is") {
  samples::at_every_level([] {
    for (const std::size_t size : samples::kSizes) {
      std::vector<std::uint32_t> indices(size);
      for (std::size_t i = 0; i < size; ++i) indices[i] = 0x7ffffff0U + static_cast<std::uint32_t>(i);
      Guarded<std::uint32_t> sorted(indices, 4);
      EXPECT(kernels::strictly_increasing(sorted.span()));
      for (std::size_t i = 1; i < size; i += size > 100 ? 13 : 1) {
        const std::uint32_t kept = sorted.span()[i];
        sorted.span()[i] = sorted.span()[i - 1];
        EXPECT(!kernels::strictly_increasing(sorted.span()));
        EXPECT(!kernels::reference::strictly_increasing(sorted.span()));
        sorted.span()[i] = kept;
      }
    }
  });
}

}  // namespace
