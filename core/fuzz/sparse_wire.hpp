#pragma once
// A fuzzed input of the sparse wire format: a recipe, then bytes.

#include <cstdint>

#include "base/types.hpp"

namespace telegrad::fuzz {

inline constexpr unsigned kModes = 7;
inline constexpr unsigned kLeavesOutMode = 5;
inline constexpr unsigned kEncodedMode = 6;

struct Recipe {
  // Modulo kModes: 0 a whole message, 4 packed values, kLeavesOutMode one that leaves values out, kEncodedMode the value
  // section of a ValueEncoding, else the index section of that IndexFormat.
  std::uint8_t mode = 0;
  std::uint8_t dtype = 0;   // modulo 6: f32, f64, bf16, f16, i32, i64
  std::uint16_t nnz = 0;    // of a section, at most 8,192; or modulo 16 how far apart the given entries are, less one
  std::uint32_t begin = 0;
  std::uint32_t range_size = 0;
  std::uint8_t encoding = 0;  // of kEncodedMode, modulo how many there are
  std::uint8_t dense = 0;     // of kEncodedMode, modulo 2: the values of a whole range
  std::uint16_t unused = 0;
};
static_assert(sizeof(Recipe) == 16);

/// Reads `input` as a message at every SIMD level: whether it was accepted. CHECKs that all agree, and that what is
/// accepted is a sound vector that every format carries unchanged.
bool read_sparse_message(ConstBytes input);

}  // namespace telegrad::fuzz

/// As libFuzzer calls it; always 0.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
