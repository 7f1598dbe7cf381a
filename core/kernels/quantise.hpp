#pragma once
// f32 values as a few bits each. Every bucket of consecutive values has a header that says which levels its codes stand
// for. A bucket of n values is the header, then n codes, least significant bits first. So whole buckets can be encoded and
// decoded by themselves. Spare bits of the last byte are 0. There are three kinds of levels.
//
// Even: the header is the f32 scale, the largest magnitude. Codes are signed numbers q in [-s, s] with s = 2^(bits - 1) - 1;
// a value is scale · (q / s). QSGD rounds to a neighbouring level at random such that the mean is the value:
// Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: communication-efficient SGD via gradient quantization and encoding",
// NeurIPS 2017, with the largest magnitude in place of the 2-norm. int8 rounds to the nearest level.
//
// Where the caller takes the error, QSGD rounds to the nearest level too. Error feedback needs no unbiased mean, but an
// error that is smaller than the values: to the nearest no value grows in error. At random the small values of a bucket
// with one large value have errors many times their own magnitude, and the residual never gets rid of them.
//
// Powers: the header is the same scale. A code is 0, or a sign and an exponent: q in [-7, 7] is sign(q) · scale · 2^(|q| - 7).
// This is E3M0, a sign and three bits of exponent: Douillard et al., "Streaming DiLoCo with overlapping communication",
// arXiv 2501.18512. To the nearest level, an error is at most a third of the value, or scale / 128.
//
// Codebook: the header is four bf16 in ascending order, a code says which. Sarfi et al., "Communication efficient LLM
// pre-training with SparseLoCo", arXiv 2508.15706, have four bins of equal width over ±3 standard deviations around the
// mean, and the mean of each bin for its values. Here the outer bins begin 1.5 mean absolute deviations from the mean, and two
// iterations of Lloyd's algorithm follow (IEEE Transactions on Information Theory 28, 1982). Each value takes the nearest
// level. Sums are of integers, values as parts of 2^20 of the largest magnitude: their order does not matter.
//
// A bucket that has a NaN or an infinity among its values decodes to NaN as a whole (its header is of canonical NaNs), and
// leaves an error of 0: there is nothing to keep for later that would not spoil it.

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.hpp"

namespace telegrad::kernels {

enum class Levels : std::uint8_t { even, powers, codebook };

struct Quantisation {
  unsigned bits;       // 2, 4 or 8; powers: 4; codebook: 2 (CHECKed)
  std::size_t bucket;  // values; a multiple of 64; codebook: at most 1,024 (CHECKed)
  bool stochastic;     // even levels alone (CHECKed)
  Levels levels = Levels::even;

  std::size_t header_bytes() const { return levels == Levels::codebook ? 4 * sizeof(bf16) : sizeof(float); }
  /// Of `count` values.
  std::size_t encoded_bytes(std::size_t count) const {
    const std::size_t whole = count / bucket * (header_bytes() + bucket * bits / 8);
    const std::size_t tail = count % bucket;
    return tail == 0 ? whole : whole + header_bytes() + (tail * bits + 7) / 8;
  }
};
inline constexpr Quantisation kQsgd8{8, 1024, true}, kQsgd4{4, 1024, true}, kQsgd2{2, 1024, true};
inline constexpr Quantisation kInt8{8, 256, false}, kE3m0{4, 1024, false, Levels::powers};
inline constexpr Quantisation kCodebook2{2, 512, false, Levels::codebook};

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
/// values: another length, a scale that is negative, infinite or another NaN, a code beyond s, a codebook with an infinity,
/// a negative zero, another NaN or in another order, a spare bit that is set.
[[nodiscard]] bool dequantise(const Quantisation& how, ConstBytes encoded, std::span<float> values);

namespace reference {
void quantise(const Quantisation& how, const QuantisationKey& key, std::uint64_t first, std::span<const float> values,
              Bytes out, std::span<float> error = {});
[[nodiscard]] bool dequantise(const Quantisation& how, ConstBytes encoded, std::span<float> values);
}  // namespace reference

}  // namespace telegrad::kernels
