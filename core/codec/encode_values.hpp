#pragma once
// f32 values in any of the encodings that a message may have them in: which kernel that is, and of which length.

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.hpp"
#include "kernels/quantise.hpp"

namespace telegrad::kernels {

/// So many values, or a multiple of it, are encoded by themselves, but as a mean: a vector may be cut there, and its parts'
/// bytes put one behind the other are those of the whole.
inline constexpr std::size_t kEncodingUnit = 1024;

/// Whether there is such an encoding of these values: a mean is one of values that are all of one sign.
bool encodes(ValueEncoding encoding, std::span<const float> values);

/// Of `count` values; exact.
std::size_t encoded_bytes(ValueEncoding encoding, std::size_t count);

/// See quantise(), narrow() and mean_of_one_sign(); encodes() must hold (CHECKed). `key` and `first` matter to QSGD alone. `native` copies, and leaves an error of 0.
void encode_values(ValueEncoding encoding, const QuantisationKey& key, std::uint64_t first,
                   std::span<const float> values, Bytes out, std::span<float> error = {});

/// False, and `values` are of no use, where `encoded` is not what encode_values() makes of so many values.
[[nodiscard]] bool decode_values(ValueEncoding encoding, ConstBytes encoded, std::span<float> values);

}  // namespace telegrad::kernels
