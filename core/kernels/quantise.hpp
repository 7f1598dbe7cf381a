#pragma once
// f32 values as a few bits each: every bucket of consecutive values has one f32 scale, its largest magnitude, and each
// value a level between -scale and +scale. QSGD rounds to a neighbouring level at random such that the mean is the value:
// Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: communication-efficient SGD via gradient quantization and encoding",
// NeurIPS 2017, with the largest magnitude in place of the 2-norm. int8 rounds to the nearest level.
//
// Where the caller takes the error, QSGD rounds to the nearest level too. Error feedback needs no unbiased mean, but an
// error that is smaller than the values: to the nearest no value grows in error. At random the small values of a bucket
// with one large value have errors many times their own magnitude, and the residual never gets rid of them.
//
// A bucket of n values is its scale, then n codes, least significant bits first: signed numbers q of `bits` bits, in
// [-s, s] with s = 2^(bits - 1) - 1; a value is scale · (q / s). So whole buckets can be encoded and decoded by
// themselves. Spare bits of the last byte are 0, and so is what belongs to no value.
//
// A bucket that has a NaN or an infinity among its values decodes to NaN as a whole (its scale is the canonical NaN), and
// leaves an error of 0: there is nothing to keep for later that would not spoil it.

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.hpp"

namespace telegrad::kernels {

struct Quantisation {
  unsigned bits;       // 2, 4 or 8 (CHECKed)
  std::size_t bucket;  // values; a multiple of 64 (CHECKed)
  bool stochastic;

  /// Of `count` values.
  std::size_t encoded_bytes(std::size_t count) const {
    const std::size_t whole = count / bucket * (sizeof(float) + bucket * bits / 8);
    const std::size_t tail = count % bucket;
    return tail == 0 ? whole : whole + sizeof(float) + (tail * bits + 7) / 8;
  }
};
inline constexpr Quantisation kQsgd8{8, 1024, true}, kQsgd4{4, 1024, true}, kQsgd2{2, 1024, true};
inline constexpr Quantisation kInt8{8, 256, false};

/// What the random choices of QSGD depend on, beside a value's index: choices are the same wherever all of it is.
struct QuantisationKey {
  std::uint64_t seed = 0;
  std::uint32_t call = 0;
  std::uint32_t rank = 0;
};

/// Encodes `values`, of which the first has index `first` in its vector (a multiple of 64, CHECKed), into `out` of exactly
/// encoded_bytes() bytes (CHECKed), at any alignment. `error`, unless empty, has as many elements as `values`, of which it
/// may be the memory: error[i] = values[i] - what values[i] decodes to. With an `error`, all levels are the nearest.
void quantise(const Quantisation& how, const QuantisationKey& key, std::uint64_t first, std::span<const float> values,
              Bytes out, std::span<float> error = {});

/// Decodes into `values`. False, and `values` are of no use, where `encoded` is not what quantise() makes of so many
/// values: another length, a scale that is negative, infinite or another NaN, a code beyond s, a spare bit that is set.
[[nodiscard]] bool dequantise(const Quantisation& how, ConstBytes encoded, std::span<float> values);

namespace reference {
void quantise(const Quantisation& how, const QuantisationKey& key, std::uint64_t first, std::span<const float> values,
              Bytes out, std::span<float> error = {});
[[nodiscard]] bool dequantise(const Quantisation& how, ConstBytes encoded, std::span<float> values);
}  // namespace reference

}  // namespace telegrad::kernels
