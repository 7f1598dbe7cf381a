#pragma once
// A fuzzed input of the messages that have no header: short shares of entries, counts, and keys.

#include <cstdint>

#include "base/types.hpp"

namespace telegrad::fuzz {

struct ShortRecipe {
  std::uint8_t kind = 0;    // modulo 3: a share, counts, keys
  std::uint8_t dtype = 0;   // of a share, modulo 4: f32, f64, bf16, f16
  std::uint16_t count = 0;  // of counts; the most keys; of the entries of a share
  std::uint32_t begin = 0;  // of the share's range
  std::uint32_t range_size = 0;
  std::uint32_t unused = 0;
};
static_assert(sizeof(ShortRecipe) == 16);

/// Reads `input` as such a message: whether it was accepted. CHECKs that entries ascend within their range, that keys
/// ascend, and that what is accepted is read as the same once it is written again.
bool read_short_message(ConstBytes input);

}  // namespace telegrad::fuzz

/// As libFuzzer calls it; always 0.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
