// Values in fewer bytes: every level gives the reference's bits, what is lost is told, damage is refused.
#include "kernels/narrow.hpp"

#include <algorithm>
#include <cmath>

#include "kernel_samples.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using samples::Guarded;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST("narrowing, its error and widening have the bits of the reference at every level, size and start") {
  std::mt19937 random(1);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const std::size_t size : samples::kSizes) {
      for (const std::size_t shift : {0, 4, 36}) {
        const auto values = samples::awkward_values<float>(random, size);
        std::vector<std::byte> expected(2 * size);
        std::vector<float> expected_error(size), expected_values(size);
        kernels::reference::narrow(dtype, values, expected, expected_error);
        kernels::reference::widen(dtype, expected, expected_values);
        samples::at_every_level([&] {
          Guarded<float> from(values, shift), error(size, shift), into(size, shift);
          Guarded<std::byte> out(2 * size, shift + 1), alone(2 * size, shift + 1);
          kernels::narrow(dtype, from.span(), alone.bytes());
          kernels::narrow(dtype, from.span(), out.bytes(), error.span());
          EXPECT(out.copy() == expected && alone.copy() == expected);
          EXPECT_EQ(samples::bits(error.copy()), samples::bits(expected_error));
          kernels::widen(dtype, out.bytes(), into.span());
          EXPECT_EQ(samples::bits(into.copy()), samples::bits(expected_values));
          EXPECT(from.intact() && error.intact() && out.intact() && alone.intact() && into.intact());
          kernels::narrow(dtype, from.span(), out.bytes(), from.span());  // the error in place of the values
          EXPECT(out.copy() == expected);
          EXPECT_EQ(samples::bits(from.copy()), samples::bits(expected_error));
        });
      }
    }
  }
}

TEST("a value and its error: exact where the value has a neighbour, none where it has not") {
  const std::vector<float> values{1.0F, 1.001F, -3.14159F, 1e-40F, 70'000.0F, -HUGE_VALF, kNan, 0.0F};
  for (const DType dtype : {DType::bf16, DType::f16}) {
    std::vector<std::byte> bytes(2 * values.size());
    std::vector<float> error(values.size()), got(values.size());
    kernels::narrow(dtype, values, bytes, error);
    kernels::widen(dtype, bytes, got);
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (std::isfinite(got[i])) {
        EXPECT_EQ(got[i] + error[i], values[i]);
      } else {
        EXPECT_EQ(error[i], 0.0F);
      }
    }
    EXPECT_EQ(std::isinf(got[4]), dtype == DType::f16);
    EXPECT(std::isinf(got[5]) && got[5] < 0);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(got[6]), 0x7fc00000U);
  }
}

TEST("a NaN from the wire is widened to the canonical one") {
  for (const int word : {0x7fff, 0xffff, 0x7f81, 0x7c01, 0xfe55}) {
    samples::at_every_level([&] {
      const std::vector<std::uint16_t> words(40, static_cast<std::uint16_t>(word));
      for (const DType dtype : {DType::bf16, DType::f16}) {
        std::vector<float> got(words.size());
        kernels::widen(dtype, std::as_bytes(std::span(words)), got);
        for (const float value : got) {
          EXPECT(!std::isnan(value) || std::bit_cast<std::uint32_t>(value) == 0x7fc00000U);
        }
      }
    });
  }
}

std::vector<float> of_one_sign(std::mt19937& random, std::size_t size, float sign) {
  std::vector<float> values = samples::awkward_values<float>(random, size, false);
  for (float& value : values) {
    if (std::isinf(value)) value = std::numeric_limits<float>::max();
    value = std::copysign(value, sign);
    if (random() % 8 == 0) value = random() % 2 == 0 ? 0.0F : -0.0F;
  }
  return values;
}

TEST("the mean of one sign has the bits of the reference at every level, size and start") {
  std::mt19937 random(2);
  for (const std::size_t size : samples::kSizes) {
    for (const float sign : {1.0F, -1.0F}) {
      for (const float spoiled : {0.0F, kNan, HUGE_VALF}) {
        auto values = of_one_sign(random, size, sign);
        if (spoiled != 0.0F && size > 0) values[size / 2] = spoiled;
        std::vector<std::byte> expected(kernels::kMeanBytes);
        std::vector<float> expected_error(size);
        REQUIRE(kernels::reference::mean_of_one_sign(values, expected, expected_error));
        samples::at_every_level([&] {
          Guarded<float> from(values, 4), error(size, 8), into(size, 4);
          Guarded<std::byte> out(kernels::kMeanBytes, 3);
          REQUIRE(kernels::mean_of_one_sign(from.span(), out.bytes(), error.span()));
          EXPECT(out.copy() == expected);
          EXPECT_EQ(samples::bits(error.copy()), samples::bits(expected_error));
          REQUIRE(kernels::fill_mean(out.bytes(), into.span()));
          float mean;
          std::memcpy(&mean, expected.data(), sizeof mean);
          EXPECT_EQ(samples::bits(into.copy()), samples::bits(std::vector<float>(size, mean)));
          EXPECT(from.intact() && error.intact() && into.intact() && out.intact());
        });
      }
    }
  }
}

TEST("the mean is the mean, and errors cancel") {
  const std::vector<float> values{1.0F, 2.0F, 0.0F, 5.0F, -0.0F};
  std::vector<std::byte> bytes(kernels::kMeanBytes);
  std::vector<float> error(5), got(5);
  REQUIRE(kernels::mean_of_one_sign(values, bytes, error));
  REQUIRE(kernels::fill_mean(bytes, got));
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(got[i], 1.6, 1e-6);
    EXPECT_EQ(error[i], values[i] - got[i]);
  }
}

TEST("two signs are refused wherever the odd one is, and nothing is written") {
  samples::at_every_level([] {
    for (const std::size_t size : {2, 17, 64, 131}) {
      for (std::size_t at = 0; at < size; ++at) {
        for (const float odd : {-1e-42F, -1.0F}) {
          std::vector<float> values(size, 1.0F), error(size, 7.0F);
          values[at] = odd;
          std::vector<std::byte> out(kernels::kMeanBytes, std::byte{0x5a});
          EXPECT(!kernels::mean_of_one_sign(values, out, error));
          EXPECT(!kernels::reference::mean_of_one_sign(values, out, error));
          EXPECT(out == std::vector<std::byte>(kernels::kMeanBytes, std::byte{0x5a}));
          EXPECT(error == std::vector<float>(size, 7.0F));
        }
      }
    }
  });
}

TEST("a damaged mean is refused") {
  std::vector<float> into(3);
  const auto refused = [&](const std::vector<std::byte>& bytes) { return !kernels::fill_mean(bytes, into); };
  EXPECT(refused({}) && refused(std::vector<std::byte>(3)) && refused(std::vector<std::byte>(5)));
  for (const std::uint32_t word : {0x7f800000U, 0xff800000U, 0x7fc00001U, 0xffc00000U, 0x7f800001U}) {
    std::vector<std::byte> bytes(kernels::kMeanBytes);
    std::memcpy(bytes.data(), &word, sizeof word);
    EXPECT(refused(bytes));
  }
}

}  // namespace
