// The fuzzer's entry point without a fuzzer: shares, counts and keys, undamaged and damaged.
#include <algorithm>
#include <random>
#include <vector>

#include "codec/short_numbers.hpp"
#include "codec/short_share.hpp"
#include "fuzz/short_messages.hpp"
#include "fuzz_input.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using fuzz::Input;
using fuzz::input_of;

template <class V>
Input share_of(std::mt19937& random, fuzz::ShortRecipe recipe, std::uint8_t dtype) {
  recipe.dtype = dtype;
  recipe.begin = random() % 2 == 0 ? 0 : static_cast<std::uint32_t>(random());
  recipe.range_size = random() % 2 == 0 ? static_cast<std::uint32_t>(random()) : static_cast<std::uint32_t>(random() % 2000);
  const std::uint64_t end = std::min<std::uint64_t>(std::uint64_t{recipe.begin} + recipe.range_size, kDimensionMost);
  std::vector<std::uint32_t> indices;
  for (std::uint64_t at = recipe.begin; at < end && indices.size() < 60; at += 1 + random() % (1U << random() % 31)) {
    indices.push_back(static_cast<std::uint32_t>(at));
  }
  std::vector<V> values(indices.size());
  for (V& value : values) value = static_cast<V>(static_cast<float>(random() % 1000));
  recipe.count = static_cast<std::uint16_t>(indices.size());
  return input_of(recipe, encode_short(SparseView<V>{{recipe.begin, end}, false, indices, values}).bytes());
}

Input undamaged(std::mt19937& random) {
  fuzz::ShortRecipe recipe;
  recipe.kind = static_cast<std::uint8_t>(random() % 3);
  if (recipe.kind == 0) {
    switch (random() % 4) {
      case 1: return share_of<double>(random, recipe, 1);
      case 2: return share_of<bf16>(random, recipe, 2);
      case 3: return share_of<f16>(random, recipe, 3);
      default: return share_of<float>(random, recipe, 0);
    }
  }
  std::vector<std::uint64_t> numbers(random() % 80);
  for (std::uint64_t& number : numbers) {
    number = random() % 3 == 0 ? 0 : (std::uint64_t{random()} << 24 | random() % 256) >> random() % 56;
  }
  recipe.count = static_cast<std::uint16_t>(numbers.size());
  if (recipe.kind == 1) return input_of(recipe, encode_counts(numbers).bytes());
  std::ranges::sort(numbers);
  return input_of(recipe, encode_keys(numbers).bytes());
}

TEST("undamaged messages are accepted, damaged ones refused or sound") {
  std::mt19937 random(61);
  int refused = 0;
  constexpr int kRounds = 20'000;
  for (int round = 0; round < kRounds; ++round) {
    Input input = undamaged(random);
    EXPECT(fuzz::read_short_message(std::as_bytes(std::span(input))));
    fuzz::damage(input, random, [&](std::size_t size) { return random() % size; });
    EXPECT_EQ(LLVMFuzzerTestOneInput(input.data(), input.size()), 0);
    refused += fuzz::read_short_message(std::as_bytes(std::span(input))) ? 0 : 1;
  }
  EXPECT(refused > kRounds / 8);
  EXPECT(refused < kRounds);
}

TEST("noise is refused or sound") {
  std::mt19937 random(62);
  for (int round = 0; round < 20'000; ++round) {
    Input input(random() % 200);
    fuzz::fill_with_noise(input, random, 3);
    EXPECT_EQ(LLVMFuzzerTestOneInput(input.data(), input.size()), 0);
  }
}

}  // namespace
