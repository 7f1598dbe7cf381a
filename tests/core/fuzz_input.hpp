// Inputs of a fuzzer's entry point, for tests that call it without a fuzzer.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "base/types.hpp"

namespace telegrad::fuzz {

using Input = std::vector<std::uint8_t>;

inline void append(Input& input, ConstBytes bytes) {
  const auto* const first = reinterpret_cast<const std::uint8_t*>(bytes.data());
  input.insert(input.end(), first, first + bytes.size());
}

// A recipe, which says how the bytes behind it are read.
template <class R>
Input input_of(const R& recipe, ConstBytes bytes) {
  Input input;
  append(input, std::as_bytes(std::span(&recipe, 1)));
  append(input, bytes);
  return input;
}

// Any bytes in one of `one_in`, and else zeros, which most fields of a small message are.
inline void fill_with_noise(Input& input, std::mt19937& random, unsigned one_in) {
  for (std::uint8_t& byte : input) byte = random() % one_in == 0 ? static_cast<std::uint8_t>(random()) : 0;
}

// Some bytes become others or differ in one bit, and sometimes the end is missing. `at` draws which, of an input's size.
template <class At>
void damage(Input& input, std::mt19937& random, At at) {
  for (std::size_t change = random() % 4; change > 0; --change) {
    std::uint8_t& byte = input[at(input.size())];
    byte = static_cast<std::uint8_t>(random() % 2 == 0 ? random() : byte ^ 1U << random() % 8);
  }
  if (random() % 8 == 0) input.resize(random() % (input.size() + 1));
}

}  // namespace telegrad::fuzz
