#include "kernels/quantise.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>

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

constexpr std::int32_t levels_of(unsigned bits) { return (1 << (bits - 1)) - 1; }

// Magnitudes up to `scale` become those up to `most`. The reciprocal of a denormal scale would be infinite.
struct Normalisation {
  Normalisation(float scale, float most) : magnify(scale < 0x1p-60F ? 0x1p100F : 1.0F) {
    factor = scale > 0.0F ? most / (scale * magnify) : 0.0F;
  }
  TELEGRAD_INTO_CALLER float of(float value) const { return value * magnify * factor; }
  float magnify;
  float factor;
};

// Levels of each kind: of finite values, of which `scale` is the largest magnitude, or as a header says.

// With one scale as the header.
class Scaled {
 public:
  static constexpr std::size_t kHeaderBytes = sizeof(float);
  static void write_nan(std::byte* header) { std::memcpy(header, &kNanScale, sizeof kNanScale); }
  void write(std::byte* header) const { std::memcpy(header, &scale_, sizeof scale_); }

 protected:
  explicit Scaled(float scale) : scale_(scale) {}
  // A scale that is NaN makes all products with it NaN.
  bool read_scale(const std::byte* header) {
    std::memcpy(&scale_, header, sizeof scale_);
    const auto bits = std::bit_cast<std::uint32_t>(scale_);
    return bits < kInfinity || bits == kNanScale;
  }
  float scale_;
};

// A normalised magnitude is its level with kFractionBits bits after the point: adding as many random bits and dropping the
// fraction rounds up with the probability that the fraction is.
template <unsigned kBits>
class EvenLevels : public Scaled {
 public:
  static constexpr unsigned kCodeBits = kBits;
  static constexpr std::int32_t kLeastCode = -levels_of(kBits);

  EvenLevels() : EvenLevels(nullptr, 0, 0.0F) {}
  EvenLevels(const Element<float>*, std::size_t, float scale) : Scaled(scale), to_fixed_(scale, kMost) {}
  bool read(const std::byte* header) { return read_scale(header); }

  TELEGRAD_INTO_CALLER std::int32_t code_of(float value, std::uint32_t word) const {
    const auto bits = std::bit_cast<std::int32_t>(value);
    const float level = to_fixed_.of(std::bit_cast<float>(bits & 0x7fffffff));
    const auto fixed = static_cast<std::int32_t>(level < kMost ? level : kMost);
    const auto rounded = static_cast<std::int32_t>((static_cast<std::uint32_t>(fixed) + (word >> 8)) >> kFractionBits);
    const std::int32_t sign = bits >> 31;
    return (rounded ^ sign) - sign;
  }
  TELEGRAD_INTO_CALLER float value_of(std::int32_t code) const { return scale_ * (static_cast<float>(code) * kUnit); }

 private:
  static constexpr float kMost = static_cast<float>(levels_of(kBits)) * static_cast<float>(1U << kFractionBits);
  static constexpr float kUnit = 1.0F / static_cast<float>(levels_of(kBits));
  Normalisation to_fixed_;
};

class PowerLevels : public Scaled {
 public:
  static constexpr unsigned kCodeBits = 4;
  static constexpr std::int32_t kLeastCode = -7;

  PowerLevels() : PowerLevels(nullptr, 0, 0.0F) {}
  PowerLevels(const Element<float>*, std::size_t, float scale) : Scaled(scale), to_one_(scale, 1.0F) {}
  bool read(const std::byte* header) { return read_scale(header); }

  TELEGRAD_INTO_CALLER std::int32_t code_of(float value, std::uint32_t) const {
    const auto bits = std::bit_cast<std::int32_t>(value);
    const float part = to_one_.of(std::bit_cast<float>(bits & 0x7fffffff));
    const std::int32_t exponent = (std::bit_cast<std::int32_t>(part) + kHalfFraction) >> kExponentShift;
    const std::int32_t code = std::max(exponent - kZeroExponent, part >= 0x1p-7F ? 1 : 0);  // 2^-7: half the first level
    const std::int32_t sign = bits >> 31;
    return (code ^ sign) - sign;
  }
  TELEGRAD_INTO_CALLER float value_of(std::int32_t code) const {
    const std::int32_t exponent = (code < 0 ? -code : code) + kZeroExponent;
    const std::int32_t bits = (exponent << kExponentShift) | (code & std::numeric_limits<std::int32_t>::min());
    return scale_ * std::bit_cast<float>(code == 0 ? 0 : bits);
  }

 private:
  static constexpr std::int32_t kExponentShift = 23;
  static constexpr std::int32_t kHalfFraction = 1 << (kExponentShift - 1);
  static constexpr std::int32_t kZeroExponent = 127 - 7;
  Normalisation to_one_;
};

class CodebookLevels {
 public:
  static constexpr unsigned kCodeBits = 2;
  static constexpr std::int32_t kLeastCode = -2;
  static constexpr std::size_t kLevels = 4;
  static constexpr std::size_t kHeaderBytes = kLevels * sizeof(bf16);
  static constexpr std::size_t kBucketMost = 1024;  // of so many values the sums below fit

  CodebookLevels() = default;
  TELEGRAD_INTO_CALLER CodebookLevels(const Element<float>* values, std::size_t count, float scale) {
    const Normalisation to_fixed(scale, kOne);
    Edges edges = first_edges(values, count, to_fixed);
    for (int iteration = 0; iteration < kIterations; ++iteration) {
      const auto centers = bins_of(values, count, to_fixed, edges).each<std::int32_t>(std::divides<>{});
      for (std::size_t k = 0; k < edges.size(); ++k) edges[k] = (centers[k] + centers[k + 1]) >> 1;
    }
    const double unit = static_cast<double>(scale) / static_cast<double>(kOne);
    const Bins bins = bins_of(values, count, to_fixed, edges);
    set(bins.each<bf16>([&](std::int32_t sum, std::int32_t held) {
      return finite_bf16(static_cast<float>(static_cast<double>(sum) / static_cast<double>(held) * unit));
    }));
  }

  static void write_nan(std::byte* header) {
    constexpr std::array<std::uint16_t, kLevels> kNans{kNan, kNan, kNan, kNan};
    std::memcpy(header, kNans.data(), sizeof kNans);
  }
  void write(std::byte* header) const {
    for (std::size_t k = 0; k < kLevels; ++k) {
      const auto upper = static_cast<std::uint16_t>(levels_[k] >> 16);
      std::memcpy(header + k * sizeof upper, &upper, sizeof upper);
    }
  }
  bool read(const std::byte* header) {
    std::array<bf16, kLevels> levels;
    std::memcpy(levels.data(), header, sizeof levels);
    set(levels);
    if (std::ranges::all_of(levels, [](bf16 level) { return level.bits == kNan; })) return true;
    return std::ranges::is_sorted(levels, {}, [](bf16 level) { return static_cast<float>(level); }) &&
           std::ranges::none_of(levels, [](bf16 level) {
             return (level.bits & kMagnitude) >= kInfinite || level.bits == kNegativeZero;
           });
  }

  TELEGRAD_INTO_CALLER std::int32_t code_of(float value, std::uint32_t) const {
    return (value >= bounds_[0] ? 1 : 0) + (value >= bounds_[1] ? 1 : 0) + (value >= bounds_[2] ? 1 : 0);
  }
  TELEGRAD_INTO_CALLER float value_of(std::int32_t code) const {  // without a table, which would be read value by value
    const auto bits = static_cast<std::uint32_t>(code);
    const std::uint32_t odd = -(bits & 1U), upper = -(bits >> 1 & 1U);
    const std::uint32_t low = levels_[0] ^ ((levels_[0] ^ levels_[1]) & odd);
    const std::uint32_t high = levels_[2] ^ ((levels_[2] ^ levels_[3]) & odd);
    return std::bit_cast<float>(low ^ ((low ^ high) & upper));
  }

 private:
  using Edges = std::array<std::int32_t, kLevels - 1>;
  static constexpr float kOne = 0x1p20F;
  static constexpr int kIterations = 2;
  static constexpr std::uint16_t kNan = 0x7fc0, kInfinite = 0x7f80, kMagnitude = 0x7fff, kNegativeZero = 0x8000;

  struct Bins {
    std::array<std::int32_t, kLevels> sums, counts;

    // of(sum, count) of each bin. Empty ones have that of the nearest lower bin that is not, or else of the lowest.
    template <class V, class Of>
    std::array<V, kLevels> each(Of of) const {
      std::size_t held = 0;
      while (counts[held] == 0) ++held;
      std::array<V, kLevels> all;
      for (std::size_t k = 0; k < kLevels; ++k) {
        if (counts[k] != 0) held = k;
        all[k] = of(sums[held], counts[held]);
      }
      return all;
    }
  };

  TELEGRAD_INTO_CALLER static Edges first_edges(const Element<float>* values, std::size_t count,
                                                const Normalisation& to_fixed) {
    const auto number = static_cast<std::int32_t>(count);
    std::int32_t sum = 0, deviations = 0;
    for (std::size_t i = 0; i < count; ++i) sum += static_cast<std::int32_t>(to_fixed.of(values[i].get()));
    const std::int32_t mean = sum / number;
    for (std::size_t i = 0; i < count; ++i) {
      const std::int32_t deviation = static_cast<std::int32_t>(to_fixed.of(values[i].get())) - mean;
      deviations += deviation < 0 ? -deviation : deviation;
    }
    const std::int32_t outer = deviations / number * 3 / 2;
    return {mean - outer, mean, mean + outer};
  }

  TELEGRAD_INTO_CALLER static Bins bins_of(const Element<float>* values, std::size_t count, const Normalisation& to_fixed,
                                           const Edges& edges) {
    const std::int32_t first = edges[0], second = edges[1], third = edges[2];
    std::int32_t all = 0, above_first = 0, above_second = 0, above_third = 0;
    std::int32_t from_first = 0, from_second = 0, from_third = 0;  // how many
    for (std::size_t i = 0; i < count; ++i) {
      const auto fixed = static_cast<std::int32_t>(to_fixed.of(values[i].get()));
      all += fixed;
      above_first += fixed >= first ? fixed : 0;
      above_second += fixed >= second ? fixed : 0;
      above_third += fixed >= third ? fixed : 0;
      from_first += fixed >= first ? 1 : 0;
      from_second += fixed >= second ? 1 : 0;
      from_third += fixed >= third ? 1 : 0;
    }
    return {{all - above_first, above_first - above_second, above_second - above_third, above_third},
            {static_cast<std::int32_t>(count) - from_first, from_first - from_second, from_second - from_third, from_third}};
  }

  static bf16 finite_bf16(float value) {
    bf16 rounded(value);
    if ((rounded.bits & kMagnitude) >= kInfinite) --rounded.bits;
    if (rounded.bits == kNegativeZero) rounded.bits = 0;
    return rounded;
  }

  void set(const std::array<bf16, kLevels>& levels) {
    for (std::size_t k = 0; k < kLevels; ++k) levels_[k] = static_cast<std::uint32_t>(levels[k].bits) << 16;
    for (std::size_t k = 0; k < bounds_.size(); ++k) {  // halves first: the sum of two could be infinite
      bounds_[k] = 0.5F * static_cast<float>(levels[k]) + 0.5F * static_cast<float>(levels[k + 1]);
    }
  }

  std::array<std::uint32_t, kLevels> levels_{};  // as floats
  std::array<float, kLevels - 1> bounds_{};      // between them
};

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
template <class Coder>
TELEGRAD_INTO_CALLER void encode_group(const Element<float>* values, const Coder& coder, const std::uint32_t* words,
                                       std::byte* out) {
  constexpr unsigned kBits = Coder::kCodeBits;
  std::int8_t codes[kGroup];
  for (std::size_t i = 0; i < kGroup; ++i) {
    codes[i] = static_cast<std::int8_t>(coder.code_of(values[i].get(), words[i]));
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

template <class Coder>
TELEGRAD_INTO_CALLER void values_of(const std::int8_t (&codes)[kGroup], const Coder& coder, Element<float>* values) {
  for (std::size_t i = 0; i < kGroup; ++i) values[i].set(coder.value_of(codes[i]));
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

template <class Coder, DrawFunction* kDraw>
TELEGRAD_INTO_CALLER void encode_bucket(const std::byte* from, std::size_t count, const Draws& draws, std::byte* out,
                                        std::byte* error) {
  constexpr unsigned kBits = Coder::kCodeBits;
  const auto* const values = elements<float>(from);
  auto* const errors = elements<float>(error);
  const std::uint32_t largest = largest_magnitude(values, count);
  if (largest >= kInfinity) {
    Coder::write_nan(out);
    std::memset(out + Coder::kHeaderBytes, 0, (count * kBits + 7) / 8);
    if (error != nullptr) std::memset(error, 0, count * sizeof(float));
    return;
  }
  const Coder coder(values, count, std::bit_cast<float>(largest));
  coder.write(out);
  out += Coder::kHeaderBytes;
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
    encode_group(group, coder, words, codes);
    if (here < kGroup) {
      const std::size_t bytes = (here * kBits + 7) / 8;
      if (const auto used = static_cast<unsigned>(here * kBits % 8); used != 0) {
        spare[bytes - 1] &= static_cast<std::byte>((1U << used) - 1U);  // a codebook's zero has a code, too
      }
      std::memcpy(out, spare, bytes);
    }
    if (error == nullptr) continue;
    std::int8_t again[kGroup];
    Element<float> decoded[kGroup];
    decode_group<kBits>(codes, again);
    values_of(again, coder, decoded);
    errors_of(group, decoded, here, errors + i);
  }
}

template <class Coder>
TELEGRAD_INTO_CALLER bool decode_bucket(const std::byte* in, std::byte* into, std::size_t count) {
  constexpr unsigned kBits = Coder::kCodeBits;
  Coder coder;
  if (!coder.read(in)) return false;
  in += Coder::kHeaderBytes;
  auto* const values = elements<float>(into);
  std::int32_t least = 0;
  std::int8_t codes[kGroup];
  std::size_t i = 0;
  for (; i + kGroup <= count; i += kGroup, in += kGroupBytes<kBits>) {
    least = std::min(least, decode_group<kBits>(in, codes));
    values_of(codes, coder, values + i);
  }
  if (const std::size_t left = count - i; left > 0) {
    const std::size_t bytes = (left * kBits + 7) / 8;
    std::byte filled[kGroupBytes<kBits>] = {};
    std::memcpy(filled, in, bytes);
    const auto used = static_cast<unsigned>(left * kBits % 8);  // of the last byte; 0: all of it
    if (used != 0 && std::to_integer<unsigned>(filled[bytes - 1]) >> used != 0) return false;
    least = std::min(least, decode_group<kBits>(filled, codes));
    Element<float> decoded[kGroup];
    values_of(codes, coder, decoded);
    std::memcpy(into + i * sizeof(float), decoded, left * sizeof(float));
  }
  return least >= Coder::kLeastCode;
}

using EncodeFunction = void(const std::byte* from, std::size_t count, const Draws& draws, std::byte* out,
                            std::byte* error);
using DecodeFunction = bool(const std::byte* in, std::byte* into, std::size_t count);

template <class Coder>
void encode_portable(const std::byte* from, std::size_t count, const Draws& draws, std::byte* out, std::byte* error) {
  encode_bucket<Coder, philox::draw_portable>(from, count, draws, out, error);
}
template <class Coder>
bool decode_portable(const std::byte* in, std::byte* into, std::size_t count) {
  return decode_bucket<Coder>(in, into, count);
}

#ifdef TELEGRAD_KERNELS_X86

template <class Coder>
TELEGRAD_AVX2 void encode_avx2(const std::byte* from, std::size_t count, const Draws& draws, std::byte* out,
                               std::byte* error) {
  encode_bucket<Coder, philox::draw_avx2>(from, count, draws, out, error);
}
template <class Coder>
TELEGRAD_AVX2 bool decode_avx2(const std::byte* in, std::byte* into, std::size_t count) {
  return decode_bucket<Coder>(in, into, count);
}
template <class Coder>
TELEGRAD_AVX512 void encode_avx512(const std::byte* from, std::size_t count, const Draws& draws, std::byte* out,
                                   std::byte* error) {
  encode_bucket<Coder, philox::draw_avx512>(from, count, draws, out, error);
}
template <class Coder>
TELEGRAD_AVX512 bool decode_avx512(const std::byte* in, std::byte* into, std::size_t count) {
  return decode_bucket<Coder>(in, into, count);
}

template <class Coder>
constexpr Variants<EncodeFunction> kEncode{encode_portable<Coder>, encode_avx2<Coder>, encode_avx512<Coder>};
template <class Coder>
constexpr Variants<DecodeFunction> kDecode{decode_portable<Coder>, decode_avx2<Coder>, decode_avx512<Coder>};

#else

template <class Coder>
constexpr Variants<EncodeFunction> kEncode{encode_portable<Coder>};
template <class Coder>
constexpr Variants<DecodeFunction> kDecode{decode_portable<Coder>};

#endif

// Calls body.operator()<Coder>() with the levels of `how`.
template <class Body>
auto with_coder(const Quantisation& how, const Body& body) {
  if (how.levels == Levels::powers) return body.template operator()<PowerLevels>();
  if (how.levels == Levels::codebook) return body.template operator()<CodebookLevels>();
  if (how.bits == 8) return body.template operator()<EvenLevels<8>>();
  return how.bits == 4 ? body.template operator()<EvenLevels<4>>() : body.template operator()<EvenLevels<2>>();
}

EncodeFunction* encoder_of(const Quantisation& how) {
  return with_coder(how, []<class Coder> { return kEncode<Coder>.at(simd_level()); });
}
DecodeFunction* decoder_of(const Quantisation& how) {
  return with_coder(how, []<class Coder> { return kDecode<Coder>.at(simd_level()); });
}

void check(const Quantisation& how) {
  TELEGRAD_CHECK((how.bits == 2 || how.bits == 4 || how.bits == 8) && how.bucket > 0 && how.bucket % kGroup == 0);
  TELEGRAD_CHECK(how.levels == Levels::even || !how.stochastic);
  TELEGRAD_CHECK(how.levels != Levels::powers || how.bits == PowerLevels::kCodeBits);
  TELEGRAD_CHECK(how.levels != Levels::codebook ||
                 (how.bits == CodebookLevels::kCodeBits && how.bucket <= CodebookLevels::kBucketMost));
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
  EncodeFunction* const encode = encoder_of(how);
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
  DecodeFunction* const decode = decoder_of(how);
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

template <class Coder>
void encode(const Quantisation& how, const QuantisationKey& key, std::uint64_t first, std::span<const float> values,
            Bytes out, std::span<float> error) {
  for (std::size_t begin = 0; begin < values.size(); begin += how.bucket) {
    const std::size_t end = std::min(begin + how.bucket, values.size());
    std::byte* const bucket = out.data() + how.encoded_bytes(begin);
    std::uint32_t scale = 0;
    for (std::size_t i = begin; i < end; ++i) scale = std::max(scale, magnitude_bits(values[i]));
    if (scale >= kInfinity) {
      Coder::write_nan(bucket);
      std::ranges::fill(error.empty() ? error : error.subspan(begin, end - begin), 0.0F);
      continue;
    }
    const std::span<const float> own = values.subspan(begin, end - begin);
    const Coder coder(elements<float>(std::as_bytes(own).data()), own.size(), std::bit_cast<float>(scale));
    coder.write(bucket);
    for (std::size_t i = begin; i < end; ++i) {
      const std::int32_t code =
          coder.code_of(values[i], draws_lots(how, error) ? word_of(key, first + i) : kToNearest);
      const std::size_t bit = (i - begin) * how.bits;
      const unsigned field = (static_cast<unsigned>(code) & ((1U << how.bits) - 1U)) << bit % 8;
      bucket[Coder::kHeaderBytes + bit / 8] |= static_cast<std::byte>(field);
      if (!error.empty()) error[i] = values[i] - coder.value_of(code);
    }
  }
}

template <class Coder>
bool decode(const Quantisation& how, ConstBytes encoded, std::span<float> values) {
  for (std::size_t begin = 0; begin < values.size(); begin += how.bucket) {
    const std::size_t end = std::min(begin + how.bucket, values.size());
    const std::byte* const bucket = encoded.data() + how.encoded_bytes(begin);
    Coder coder;
    if (!coder.read(bucket)) return false;
    for (std::size_t bit = 0; bit < ((end - begin) * how.bits + 7) / 8 * 8; bit += how.bits) {
      const unsigned field = std::to_integer<unsigned>(bucket[Coder::kHeaderBytes + bit / 8]) >> bit % 8;
      const int code = static_cast<int>(field << (32 - how.bits)) >> (32 - how.bits);
      const std::size_t i = begin + bit / how.bits;
      if (code < Coder::kLeastCode || (i >= end && code != 0)) return false;
      if (i < end) values[i] = canonical(coder.value_of(code));
    }
  }
  return true;
}

}  // namespace

void quantise(const Quantisation& how, const QuantisationKey& key, std::uint64_t first, std::span<const float> values,
              Bytes out, std::span<float> error) {
  check_lengths(how, first, values, out, error);
  std::fill(out.begin(), out.end(), std::byte{0});
  with_coder(how, [&]<class Coder> { encode<Coder>(how, key, first, values, out, error); });
}

bool dequantise(const Quantisation& how, ConstBytes encoded, std::span<float> values) {
  check(how);
  return encoded.size() == how.encoded_bytes(values.size()) &&
         with_coder(how, [&]<class Coder> { return decode<Coder>(how, encoded, values); });
}

}  // namespace reference

}  // namespace telegrad::kernels
