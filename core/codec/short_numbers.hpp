#pragma once
// Numbers in few bytes, most of which are small: counts, and sorted keys.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.hpp"
#include "base/types.hpp"

namespace telegrad {

/// A byte for each count below 127, two below 16,383 and so on; three and more zeros in a row take two together.
/// Each is below 2^56 (CHECKed).
Buffer encode_counts(std::span<const std::uint64_t> counts);
/// Exactly as many as `counts` has; false if the bytes are no such message.
bool decode_counts(ConstBytes bytes, std::span<std::uint64_t> counts);
/// No message of so many counts is longer.
std::size_t most_count_bytes(std::size_t counts);

/// Keys in ascending order (CHECKed), as differences.
Buffer encode_keys(std::span<const std::uint64_t> keys);
/// Appends them; false if the bytes are no such message, or have more than `most`.
bool decode_keys(ConstBytes bytes, std::size_t most, std::vector<std::uint64_t>& keys);
std::size_t most_key_bytes(std::size_t keys);

}  // namespace telegrad
