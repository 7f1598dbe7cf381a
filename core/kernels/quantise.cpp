#include "kernels/quantise.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.hpp"
#include "kernels/arithmetic.hpp"
#include "kernels/elementwise.hpp"
#include "kernels/philox.hpp"

namespace telegrad::kernels {
namespace {

constexpr std::size_t kGroup = philox::kGroup;
constexpr std::uint32_t kNanScale = 0x7fc00000U;
constexpr std::uint32_t kInfinity = 0x7f800000U;
constexpr unsigned kFractionBits = 24;
constexpr std::uint32_t kToNearest = 0x80000000U;  // half a level, in place of a random word

constexpr int levels_of(unsigned bits) { return (1 << (bits - 1)) - 1; }

// How the values of one bucket become levels. A magnitude times `magnify`, which is 1 but for denormal scales, whose
// reciprocal would be infinite, times `to_fixed` is its level with kFractionBits bits after the point: adding as many
// random bits and dropping the fraction rounds up with the probability that the fraction is.
struct Scaling {
  Scaling(float scale, unsigned bits) : scale(scale), unit(1.0F / static_cast<float>(levels_of(bits))) {
    most = static_cast<float>(levels_of(bits)) * static_cast<float>(1U << kFractionBits);
    magnify = scale < 0x1p-60F ? 0x1p100F : 1.0F;
    to_fixed = scale > 0.0F ? most / (scale * magnify) : 0.0F;
  }
  float scale;
  float unit;
  float most;
  float magnify;
  float to_fixed;
};

TELEGRAD_INTO_CALLER std::int32_t code_of(float value, const Scaling& scaling, std::uint32_t word) {
  const auto bits = std::bit_cast<std::int32_t>(value);
  const float level = std::bit_cast<float>(bits & 0x7fffffff) * scaling.magnify * scaling.to_fixed;
  const auto fixed = static_cast<std::int32_t>(level < scaling.most ? level : scaling.most);
  const auto rounded = static_cast<std::int32_t>((static_cast<std::uint32_t>(fixed) + (word >> 8)) >> kFractionBits);
  const std::int32_t sign = bits >> 31;
  return (rounded ^ sign) - sign;
}

TELEGRAD_INTO_CALLER float value_of(std::int32_t code, const Scaling& scaling) {
  return scaling.scale * (static_cast<float>(code) * scaling.unit);
}

TELEGRAD_INTO_CALLER std::uint32_t largest_magnitude(const Element<float>* values, std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(values[i].get()));
  return largest;
}

// Eight codes, a byte each, to 8 · bits bits and back; bytes of a word are in the order of memory.
template <unsigned kBits>
TELEGRAD_INTO_CALLER std::uint64_t packed(std::uint64_t codes) {
  if constexpr (kBits == 4) {
    codes &= 0x0f0f0f0f0f0f0f0fU;
    codes = (codes | codes >> 4) & 0x00ff00ff00ff00ffU;
    codes = (codes | codes >> 8) & 0x0000ffff0000ffffU;
    return (codes | codes >> 16) & 0xffffffffU;
  } else {
    codes &= 0x0303030303030303U;
    codes = (codes | codes >> 6) & 0x000f000f000f000fU;
    codes = (codes | codes >> 12) & 0x000000ff000000ffU;
    return (codes | codes >> 24) & 0xffffU;
  }
}
template <unsigned kBits>
TELEGRAD_INTO_CALLER std::uint64_t unpacked(std::uint64_t codes) {
  if constexpr (kBits == 4) {
    codes = (codes | codes << 16) & 0x0000ffff0000ffffU;
    codes = (codes | codes << 8) & 0x00ff00ff00ff00ffU;
    return (codes | codes << 4) & 0x0f0f0f0f0f0f0f0fU;
  } else {
    codes = (codes | codes << 24) & 0x000000ff000000ffU;
    codes = (codes | codes << 12) & 0x000f000f000f000fU;
    return (codes | codes << 6) & 0x0303030303030303U;
  }
}

template <unsigned kBits>
using EightCodes = std::conditional_t<kBits == 4, std::uint32_t, std::uint16_t>;  // where they are packed

template <unsigned kBits>
inline constexpr std::size_t kGroupBytes = kGroup * kBits / 8;

// A group is kGroup values; a shorter one at the end of a vector goes through a copy that is filled up with zeros.
template <unsigned kBits>
TELEGRAD_INTO_CALLER void encode_group(const Element<float>* values, const Scaling& scaling, const std::uint32_t* words,
                                       std::byte* out) {
  std::int8_t codes[kGroup];
  for (std::size_t i = 0; i < kGroup; ++i) {
    codes[i] = static_cast<std::int8_t>(code_of(values[i].get(), scaling, words[i]));
  }
  if constexpr (kBits == 8) {
    std::memcpy(out, codes, kGroup);
  } else {
    std::uint64_t eight[kGroup / 8];
    EightCodes<kBits> narrow[kGroup / 8];
    std::memcpy(eight, codes, kGroup);
    for (std::size_t i = 0; i < kGroup / 8; ++i) narrow[i] = static_cast<EightCodes<kBits>>(packed<kBits>(eight[i]));
    std::memcpy(out, narrow, sizeof narrow);
  }
}

// The codes of a group, and the least of them.
template <unsigned kBits>
TELEGRAD_INTO_CALLER std::int32_t decode_group(const std::byte* in, std::int8_t (&codes)[kGroup]) {
  if constexpr (kBits == 8) {
    std::memcpy(codes, in, kGroup);
  } else {
    std::uint64_t eight[kGroup / 8];
    EightCodes<kBits> narrow[kGroup / 8];
    std::memcpy(narrow, in, sizeof narrow);
    for (std::size_t i = 0; i < kGroup / 8; ++i) eight[i] = unpacked<kBits>(narrow[i]);
    std::memcpy(codes, eight, kGroup);
    constexpr std::int8_t kSign = 1 << (kBits - 1);
    for (std::int8_t& code : codes) code = static_cast<std::int8_t>((code ^ kSign) - kSign);
  }
  std::int8_t least = 0;
  for (const std::int8_t code : codes) least = std::min(least, code);
  return least;
}

TELEGRAD_INTO_CALLER void values_of(const std::int8_t (&codes)[kGroup], const Scaling& scaling, Element<float>* values) {
  for (std::size_t i = 0; i < kGroup; ++i) values[i].set(value_of(codes[i], scaling));
}

TELEGRAD_INTO_CALLER void errors_of(const Element<float>* values, const Element<float>* decoded, std::size_t count,
                                    Element<float>* errors) {
#pragma GCC ivdep  // `errors` may be `values`
  for (std::size_t i = 0; i < count; ++i) errors[i].set(values[i].get() - decoded[i].get());
}

struct Draws {
  philox::Key key;
  philox::Counter first;  // of the bucket
  bool stochastic;
};
using DrawFunction = void(const philox::Counter&, const philox::Key&, std::uint32_t*);

template <unsigned kBits, DrawFunction* kDraw>
TELEGRAD_INTO_CALLER void encode_bucket(const std::byte* from, std::size_t count, const Draws& draws, std::byte* out,
                                        std::byte* error) {
  const auto* const values = elements<float>(from);
  auto* const errors = elements<float>(error);
  const std::uint32_t largest = largest_magnitude(values, count);
  const std::uint32_t scale = largest < kInfinity ? largest : kNanScale;
  std::memcpy(out, &scale, sizeof scale);
  out += sizeof scale;
  if (scale == kNanScale) {
    std::memset(out, 0, (count * kBits + 7) / 8);
    if (error != nullptr) std::memset(error, 0, count * sizeof(float));
    return;
  }
  const Scaling scaling(std::bit_cast<float>(scale), kBits);
  alignas(64) std::uint32_t words[kGroup];
  if (!draws.stochastic) std::fill_n(words, kGroup, kToNearest);
  philox::Counter counter = draws.first;
  for (std::size_t i = 0; i < count; i += kGroup, counter[0] += philox::kCounters, out += kGroupBytes<kBits>) {
    if (draws.stochastic) kDraw(counter, draws.key, words);
    const std::size_t here = std::min(kGroup, count - i);
    const Element<float>* group = values + i;
    Element<float> filled[kGroup];
    std::byte* codes = out;
    std::byte spare[kGroupBytes<kBits>];
    if (here < kGroup) {
      std::memset(filled, 0, sizeof filled);
      std::memcpy(filled, group, here * sizeof(float));
      group = filled;
      codes = spare;
    }
    encode_group<kBits>(group, scaling, words, codes);
    if (here < kGroup) std::memcpy(out, spare, (here * kBits + 7) / 8);
    if (error == nullptr) continue;
    std::int8_t again[kGroup];
    Element<float> decoded[kGroup];
    decode_group<kBits>(codes, again);
    values_of(again, scaling, decoded);
    errors_of(group, decoded, here, errors + i);
  }
}

template <unsigned kBits>
TELEGRAD_INTO_CALLER bool decode_bucket(const std::byte* in, std::byte* into, std::size_t count) {
  std::uint32_t scale;
  std::memcpy(&scale, in, sizeof scale);
  in += sizeof scale;
  if (scale >= kInfinity && scale != kNanScale) return false;
  const Scaling scaling(std::bit_cast<float>(scale), kBits);  // where the scale is NaN, so is any product with it
  auto* const values = elements<float>(into);
  std::int32_t least = 0;
  std::int8_t codes[kGroup];
  std::size_t i = 0;
  for (; i + kGroup <= count; i += kGroup, in += kGroupBytes<kBits>) {
    least = std::min(least, decode_group<kBits>(in, codes));
    values_of(codes, scaling, values + i);
  }
  if (const std::size_t left = count - i; left > 0) {
    const std::size_t bytes = (left * kBits + 7) / 8;
    std::byte filled[kGroupBytes<kBits>] = {};
    std::memcpy(filled, in, bytes);
    const auto used = static_cast<unsigned>(left * kBits % 8);  // of the last byte; 0: all of it
    if (used != 0 && std::to_integer<unsigned>(filled[bytes - 1]) >> used != 0) return false;
    least = std::min(least, decode_group<kBits>(filled, codes));
    Element<float> decoded[kGroup];
    values_of(codes, scaling, decoded);
    std::memcpy(into + i * sizeof(float), decoded, left * sizeof(float));
  }
  return least >= -levels_of(kBits);
}

using EncodeFunction = void(const std::byte* from, std::size_t count, const Draws& draws, std::byte* out,
                            std::byte* error);
using DecodeFunction = bool(const std::byte* in, std::byte* into, std::size_t count);

template <unsigned kBits>
void encode_portable(const std::byte* from, std::size_t count, const Draws& draws, std::byte* out, std::byte* error) {
  encode_bucket<kBits, philox::draw_portable>(from, count, draws, out, error);
}
template <unsigned kBits>
bool decode_portable(const std::byte* in, std::byte* into, std::size_t count) {
  return decode_bucket<kBits>(in, into, count);
}

#ifdef TELEGRAD_KERNELS_X86

template <unsigned kBits>
TELEGRAD_AVX2 void encode_avx2(const std::byte* from, std::size_t count, const Draws& draws, std::byte* out,
                               std::byte* error) {
  encode_bucket<kBits, philox::draw_avx2>(from, count, draws, out, error);
}
template <unsigned kBits>
TELEGRAD_AVX2 bool decode_avx2(const std::byte* in, std::byte* into, std::size_t count) {
  return decode_bucket<kBits>(in, into, count);
}
template <unsigned kBits>
TELEGRAD_AVX512 void encode_avx512(const std::byte* from, std::size_t count, const Draws& draws, std::byte* out,
                                   std::byte* error) {
  encode_bucket<kBits, philox::draw_avx512>(from, count, draws, out, error);
}
template <unsigned kBits>
TELEGRAD_AVX512 bool decode_avx512(const std::byte* in, std::byte* into, std::size_t count) {
  return decode_bucket<kBits>(in, into, count);
}

template <unsigned kBits>
constexpr Variants<EncodeFunction> kEncode{encode_portable<kBits>, encode_avx2<kBits>, encode_avx512<kBits>};
template <unsigned kBits>
constexpr Variants<DecodeFunction> kDecode{decode_portable<kBits>, decode_avx2<kBits>, decode_avx512<kBits>};

#else

template <unsigned kBits>
constexpr Variants<EncodeFunction> kEncode{encode_portable<kBits>};
template <unsigned kBits>
constexpr Variants<DecodeFunction> kDecode{decode_portable<kBits>};

#endif

EncodeFunction* encoder_of(unsigned bits) {
  const SimdLevel level = simd_level();
  return bits == 8 ? kEncode<8>.at(level) : bits == 4 ? kEncode<4>.at(level) : kEncode<2>.at(level);
}
DecodeFunction* decoder_of(unsigned bits) {
  const SimdLevel level = simd_level();
  return bits == 8 ? kDecode<8>.at(level) : bits == 4 ? kDecode<4>.at(level) : kDecode<2>.at(level);
}

void check(const Quantisation& how) {
  TELEGRAD_CHECK((how.bits == 2 || how.bits == 4 || how.bits == 8) && how.bucket > 0 && how.bucket % kGroup == 0);
}
void check_lengths(const Quantisation& how, std::uint64_t first, std::span<const float> values, Bytes out,
                   std::span<float> error) {
  check(how);
  TELEGRAD_CHECK(first % kGroup == 0 && out.size() == how.encoded_bytes(values.size()));
  TELEGRAD_CHECK(error.empty() || error.size() == values.size());
}

bool draws_lots(const Quantisation& how, std::span<const float> error) { return how.stochastic && error.empty(); }

philox::Key key_of(const QuantisationKey& key) {
  return {static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32)};
}
philox::Counter counter_of(const QuantisationKey& key, std::uint64_t index) {
  const std::uint64_t group = index / kGroup * philox::kCounters;
  return {static_cast<std::uint32_t>(group), static_cast<std::uint32_t>(group >> 32), key.rank, key.call};
}

}  // namespace

void quantise(const Quantisation& how, const QuantisationKey& key, std::uint64_t first, std::span<const float> values,
              Bytes out, std::span<float> error) {
  check_lengths(how, first, values, out, error);
  EncodeFunction* const encode = encoder_of(how.bits);
  const auto* const from = reinterpret_cast<const std::byte*>(values.data());
  auto* const lost = reinterpret_cast<std::byte*>(error.data());
  std::byte* to = out.data();
  for (std::size_t i = 0; i < values.size(); i += how.bucket) {
    const std::size_t count = std::min(how.bucket, values.size() - i);
    const Draws draws{key_of(key), counter_of(key, first + i), draws_lots(how, error)};
    encode(from + i * sizeof(float), count, draws, to, error.empty() ? nullptr : lost + i * sizeof(float));
    to += how.encoded_bytes(count);
  }
}

bool dequantise(const Quantisation& how, ConstBytes encoded, std::span<float> values) {
  check(how);
  if (encoded.size() != how.encoded_bytes(values.size())) return false;
  DecodeFunction* const decode = decoder_of(how.bits);
  auto* const into = reinterpret_cast<std::byte*>(values.data());
  const std::byte* in = encoded.data();
  for (std::size_t i = 0; i < values.size(); i += how.bucket) {
    const std::size_t count = std::min(how.bucket, values.size() - i);
    if (!decode(in, into + i * sizeof(float), count)) return false;
    in += how.encoded_bytes(count);
  }
  return true;
}

namespace reference {
namespace {

std::uint32_t word_of(const QuantisationKey& key, std::uint64_t index) {
  philox::Counter counter = counter_of(key, index);
  counter[0] += static_cast<std::uint32_t>(index % philox::kCounters);
  return philox::words_of(counter, key_of(key))[index % kGroup / philox::kCounters];
}

}  // namespace

void quantise(const Quantisation& how, const QuantisationKey& key, std::uint64_t first, std::span<const float> values,
              Bytes out, std::span<float> error) {
  check_lengths(how, first, values, out, error);
  std::fill(out.begin(), out.end(), std::byte{0});
  for (std::size_t begin = 0; begin < values.size(); begin += how.bucket) {
    const std::size_t end = std::min(begin + how.bucket, values.size());
    std::byte* const bucket = out.data() + how.encoded_bytes(begin);
    std::uint32_t scale = 0;
    for (std::size_t i = begin; i < end; ++i) scale = std::max(scale, magnitude_bits(values[i]));
    if (scale >= kInfinity) scale = kNanScale;
    std::memcpy(bucket, &scale, sizeof scale);
    const Scaling scaling(std::bit_cast<float>(scale), how.bits);
    for (std::size_t i = begin; i < end; ++i) {
      std::int32_t code = 0;
      if (scale != kNanScale) {
        code = code_of(values[i], scaling, draws_lots(how, error) ? word_of(key, first + i) : kToNearest);
      }
      const std::size_t bit = (i - begin) * how.bits;
      const unsigned field = (static_cast<unsigned>(code) & ((1U << how.bits) - 1U)) << bit % 8;
      bucket[sizeof scale + bit / 8] |= static_cast<std::byte>(field);
      if (!error.empty()) error[i] = scale == kNanScale ? 0.0F : values[i] - value_of(code, scaling);
    }
  }
}

bool dequantise(const Quantisation& how, ConstBytes encoded, std::span<float> values) {
  check(how);
  if (encoded.size() != how.encoded_bytes(values.size())) return false;
  for (std::size_t begin = 0; begin < values.size(); begin += how.bucket) {
    const std::size_t end = std::min(begin + how.bucket, values.size());
    const std::byte* const bucket = encoded.data() + how.encoded_bytes(begin);
    float scale;
    std::memcpy(&scale, bucket, sizeof scale);
    const auto bits = std::bit_cast<std::uint32_t>(scale);
    if (bits >= kInfinity && bits != kNanScale) return false;
    const Scaling scaling(scale, how.bits);
    for (std::size_t bit = 0; bit < ((end - begin) * how.bits + 7) / 8 * 8; bit += how.bits) {
      const unsigned field = std::to_integer<unsigned>(bucket[sizeof scale + bit / 8]) >> bit % 8;
      const int code = static_cast<int>(field << (32 - how.bits)) >> (32 - how.bits);
      const std::size_t i = begin + bit / how.bits;
      if (code < -levels_of(how.bits) || (i >= end && code != 0)) return false;
      if (i < end) values[i] = canonical(value_of(code, scaling));
    }
  }
  return true;
}

}  // namespace reference

}  // namespace telegrad::kernels
