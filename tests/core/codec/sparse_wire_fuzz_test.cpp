// The fuzzer's entry point without a fuzzer: messages of all formats, whole and as sections, undamaged and damaged.
#include <algorithm>
#include <array>
#include <cmath>

#include "fuzz/sparse_wire.hpp"
#include "fuzz_input.hpp"
#include "kernel_samples.hpp"
#include "codec/encode_values.hpp"
#include "codec/known_values.hpp"
#include "codec/pack_indices.hpp"
#include "codec/pack_values.hpp"
#include "codec/wire.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using fuzz::Input;
using fuzz::input_of;

// Crowds, deserts and runs: every mode of a block.
std::vector<std::uint32_t> any_indices(std::mt19937& random, std::uint64_t begin, std::uint64_t end) {
  constexpr double kDensities[] = {0.0, 0.0005, 0.01, 0.1, 0.7};
  std::vector<std::uint32_t> indices;
  while (begin < end) {
    const std::uint64_t next = std::min<std::uint64_t>(end, begin + 1 + random() % 20'000);
    const bool run = random() % 4 == 0;
    const std::uint64_t run_end = std::min<std::uint64_t>(next, begin + random() % 300);
    for (std::uint64_t i = begin; run && i < run_end; ++i) indices.push_back(static_cast<std::uint32_t>(i));
    for (const std::uint32_t index : samples::random_indices(random, run ? run_end : begin, next,
                                                             run ? 0.0 : kDensities[random() % 5])) {
      indices.push_back(index);
    }
    begin = next;
  }
  if (indices.size() > 8192) indices.resize(8192);
  return indices;
}

// Some octaves and what is special among them: every width of a code, and escapes.
std::vector<float> any_values(std::mt19937& random, std::size_t count) {
  std::vector<float> values = samples::awkward_values<float>(random, count);
  const unsigned octaves = 1U << random() % 6;
  for (std::size_t i = 0; i < count; ++i) {
    if (random() % 16 == 0) continue;
    values[i] = std::ldexp(1.0F + static_cast<float>(random() % 1000) / 1000, static_cast<int>(random() % octaves));
  }
  return values;
}

// A sum's message to whoever gave every fourth entry of it, of which most are in the sum as they were.
std::vector<std::byte> leaving_out(std::mt19937& random, fuzz::Recipe& recipe, std::uint64_t end,
                                   const std::vector<std::uint32_t>& indices) {
  constexpr std::size_t kEvery = 4;
  recipe.nnz = kEvery - 1;
  std::vector<float> values = any_values(random, indices.size());
  std::vector<std::uint32_t> given_indices;
  std::vector<float> given_values;
  for (std::size_t i = 0; i < indices.size(); i += kEvery) {
    given_indices.push_back(indices[i]);
    given_values.push_back(static_cast<float>(i));
    if (random() % 8 != 0) values[i] = given_values.back();
  }
  const IndexRange range{recipe.begin, end};
  const SparseView<float> sum{range, false, indices, values};
  SumMessages<float> messages(sum, {.indices = static_cast<IndexFormat>(random() % 4), .packs_values = random() % 2 == 0});
  Buffer own;
  const ConstBytes message = messages.to(0, {{range, false, given_indices, given_values}}, own);
  return {message.begin(), message.end()};
}

// Values of one encoding by themselves: as many as it can hold, of one sign for a mean.
Input encoded_section(std::mt19937& random, fuzz::Recipe recipe) {
  recipe.mode = fuzz::kEncodedMode;
  recipe.begin = 0;
  recipe.encoding = static_cast<std::uint8_t>(random() % (static_cast<unsigned>(kLastValueEncoding) + 1));
  recipe.nnz = static_cast<std::uint16_t>(1 + random() % 3000);
  recipe.range_size = recipe.nnz;
  const auto encoding = static_cast<ValueEncoding>(recipe.encoding);
  recipe.dense = encoding != ValueEncoding::mean && random() % 2 == 0;
  std::vector<float> values(recipe.nnz);
  for (float& value : values) value = std::ldexp(1.0F + static_cast<float>(random() % 100) / 100, static_cast<int>(random() % 8));
  std::vector<std::byte> encoded(kernels::encoded_bytes(encoding, values.size()));
  kernels::encode_values(encoding, {.seed = random()}, 0, values, encoded, {});
  return input_of(recipe, encoded);
}

Input undamaged(std::mt19937& random) {
  fuzz::Recipe recipe;
  recipe.begin = random() % 2 == 0 ? 0 : static_cast<std::uint32_t>(random());
  recipe.range_size = static_cast<std::uint32_t>(random() % 60'000);
  const std::uint64_t end = std::min<std::uint64_t>(std::uint64_t{recipe.begin} + recipe.range_size, kDimensionMost);
  const auto indices = any_indices(random, recipe.begin, end);
  if (random() % 4 == 0 && indices.size() >= 128) {
    const std::vector<float> values = any_values(random, indices.size());
    const ConstBytes bytes = std::as_bytes(std::span(values));
    const kernels::ValuePlan plan = kernels::plan_values(DType::f32, bytes);
    if (plan.bytes < bytes.size()) {  // nor does any message what is as long as it is
      std::vector<std::byte> packed(plan.bytes);
      kernels::pack_values(DType::f32, plan, bytes, packed);
      recipe.mode = 4;
      recipe.nnz = static_cast<std::uint16_t>(indices.size());
      return input_of(recipe, packed);
    }
  }
  const kernels::IndexPlan plan = kernels::plan_indices(indices);
  std::vector<std::byte> packed(plan.bytes);
  kernels::pack_indices(plan, indices, packed);
  if (packed.size() < 4 * indices.size() && random() % 2 == 0) {  // no message packs what is shorter raw
    recipe.mode = static_cast<std::uint8_t>(IndexFormat::packed);
    recipe.dtype = static_cast<std::uint8_t>(random());
    recipe.nnz = static_cast<std::uint16_t>(indices.size());
    return input_of(recipe, packed);
  }
  if (random() % 4 == 0 && indices.size() >= 200) {
    recipe.mode = fuzz::kLeavesOutMode;
    return input_of(recipe, leaving_out(random, recipe, end, indices));
  }
  if (random() % 4 == 0) return encoded_section(random, recipe);
  const auto vector = SparseVector<float>::sparse(end, indices, any_values(random, indices.size()));
  const auto wish = static_cast<IndexFormat>(random() % 4);
  constexpr std::array kEncodings{ValueEncoding::bf16,  ValueEncoding::f16,  ValueEncoding::int8, ValueEncoding::qsgd8,
                                  ValueEncoding::qsgd4, ValueEncoding::qsgd2, ValueEncoding::mean, ValueEncoding::e3m0,
                                  ValueEncoding::codebook2};
  const WireFormat format{.indices = wish,
                          .values = random() % 2 == 0 ? kEncodings[random() % kEncodings.size()] : ValueEncoding::native,
                          .packs_values = random() % 2 == 0};
  return input_of(recipe, encode(vector.slice(recipe.begin, end), format).bytes());
}

TEST("undamaged inputs are accepted, damaged ones refused or sound, at every level") {
  std::mt19937 random(51);
  std::size_t refused = 0;
  constexpr int kRounds = 3000;
  for (int round = 0; round < kRounds; ++round) {
    Input input = undamaged(random);
    EXPECT(fuzz::read_sparse_message(std::as_bytes(std::span(input))));
    fuzz::damage(input, random, [&](std::size_t size) {
      // Half of the damage goes into recipe and headers, where it matters most.
      return random() % (random() % 2 == 0 ? std::min<std::size_t>(size, 64) : size);
    });
    EXPECT_EQ(LLVMFuzzerTestOneInput(input.data(), input.size()), 0);
    refused += fuzz::read_sparse_message(std::as_bytes(std::span(input))) ? 0 : 1;
  }
  EXPECT(refused > kRounds / 8);
  EXPECT(refused < kRounds);
}

TEST("noise behind a recipe is refused or sound") {
  std::mt19937 random(52);
  for (int round = 0; round < 20'000; ++round) {
    Input input(random() % 400);
    fuzz::fill_with_noise(input, random, 3);
    EXPECT_EQ(LLVMFuzzerTestOneInput(input.data(), input.size()), 0);
  }
}

}  // namespace
