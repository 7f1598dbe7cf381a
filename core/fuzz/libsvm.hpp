#pragma once
// A fuzzed input of the LIBSVM parser: a recipe, then text.

#include <cstdint>

#include "base/types.hpp"

namespace telegrad::fuzz {

struct LibsvmRecipe {
  std::uint8_t index_base = 0;  // modulo 2
  std::uint8_t strict = 0;      // modulo 2
  std::uint16_t features = 0;   // 0: as many as there can be
  std::uint32_t cut = 0;        // modulo the text's length: where a second parsing divides it
};
static_assert(sizeof(LibsvmRecipe) == 8);

/// Parses `input` whole and in two ranges: how many rows were found. CHECKs that rows are sound, and that both ways find
/// the same.
std::size_t read_libsvm_text(ConstBytes input);

}  // namespace telegrad::fuzz

/// As libFuzzer calls it; always 0.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
