#include "codec/elias_fano.hpp"

#include <cstring>

#include "base/check.hpp"
#include "codec/bit_words.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/intrinsics.hpp"
#include "kernels/pack_avx2.hpp"

namespace telegrad::kernels {

namespace {

// Both may write kEliasFanoSlackBytes behind their section; that of the high bits finds zeros there.
using LowsFunction = void(const std::uint32_t* numbers, std::size_t count, std::uint32_t before, unsigned width,
                          std::byte* lows);
using HighsFunction = void(const std::uint32_t* numbers, std::size_t count, std::uint32_t before, unsigned width,
                           std::byte* highs);

std::uint32_t offset_of(const std::uint32_t* numbers, std::size_t j, std::uint32_t before) {
  return numbers[j] - before - 1 - static_cast<std::uint32_t>(j);
}

void lows_portable(const std::uint32_t* numbers, std::size_t count, std::uint32_t before, unsigned width,
                   std::byte* lows) {
  std::uint64_t pending = 0;  // low bits that have not filled four bytes yet
  unsigned held = 0;
  for (std::size_t j = 0; j < count; ++j) {
    pending |= (offset_of(numbers, j, before) & low_bits(width)) << held;
    held += width;
    if (held < 32) continue;
    const auto full = static_cast<std::uint32_t>(pending);
    std::memcpy(lows, &full, sizeof full);
    lows += sizeof full;
    pending >>= 32;
    held -= 32;
  }
  if (held > 0) std::memcpy(lows, &pending, (held + 7) / 8);
}

// Sets bits of a high section in ascending order, word by word.
class HighWords {
 public:
  explicit HighWords(std::byte* highs) : highs_(highs) {}

  std::size_t first_bit() const { return 64 * at_; }
  /// Whether a bit lies in the present word or the next one.
  bool reaches(std::size_t bit) const { return bit < 64 * (at_ + 2); }
  /// Bits of the present word and the next one, of which `last` is the last.
  void set(std::uint64_t here, std::uint64_t next, std::size_t last) {
    word_ |= here;
    store_word(highs_ + 8 * at_, word_);
    const bool goes_on = last / 64 != at_;
    word_ = goes_on ? next : word_;
    at_ += goes_on ? 1 : 0;
  }
  /// Of numbers[begin], …, numbers[end - 1] each its bit.
  void set_each(const std::uint32_t* numbers, std::size_t begin, std::size_t end, std::uint32_t before,
                unsigned width) {
    for (std::size_t j = begin; j < end; ++j) {
      const std::size_t bit = (offset_of(numbers, j, before) >> width) + j;
      if (bit / 64 != at_) {
        finish();
        at_ = bit / 64;
        word_ = 0;
      }
      word_ |= std::uint64_t{1} << bit % 64;
    }
  }
  void finish() { store_word(highs_ + 8 * at_, word_); }

 private:
  std::byte* highs_;
  std::uint64_t word_ = 0;
  std::size_t at_ = 0;
};

void highs_portable(const std::uint32_t* numbers, std::size_t count, std::uint32_t before, unsigned width,
                    std::byte* highs) {
  HighWords words(highs);
  words.set_each(numbers, 0, count, before, width);
  words.finish();
}

#ifdef TELEGRAD_KERNELS_X86

// Eight offsets give `width` whole bytes: two halves of four offsets each, the second of which begins within a byte
// where the width is odd.
TELEGRAD_AVX2 void lows_avx2(const std::uint32_t* numbers, std::size_t count, std::uint32_t before, unsigned width,
                             std::byte* lows) {
  std::size_t j = 0;
  if (width <= 16) {
    const int bits = static_cast<int>(width);
    const __m256i keep = _mm256_set1_epi32(static_cast<int>(low_bits(width)));
    const __m256i low_lane = _mm256_set1_epi64x(0xffffffff);
    const __m256i second = _mm256_setr_epi64x(0, 2 * bits, 0, 2 * bits);
    const __m128i joined = _mm_cvtsi32_si128(32 - bits);
    const unsigned odd = width % 2 * 4;
    const std::uint64_t carried = odd == 0 ? 0 : ~std::uint64_t{0};
    const unsigned carry = odd == 0 ? 0 : 4 * width - odd;
    __m256i skipped = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(before + 1)),
                                       _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    for (; j + 8 <= count; j += 8, lows += width) {
      const __m256i at = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers + j));
      const __m256i low = _mm256_and_si256(_mm256_sub_epi32(at, skipped), keep);
      skipped = _mm256_add_epi32(skipped, _mm256_set1_epi32(8));
      const __m256i pairs = _mm256_or_si256(_mm256_and_si256(low, low_lane),
                                            _mm256_srl_epi64(_mm256_andnot_si256(low_lane, low), joined));
      const __m256i placed = _mm256_sllv_epi64(pairs, second);
      const __m256i fours = _mm256_or_si256(placed, _mm256_shuffle_epi32(placed, 0x4e));
      const auto first_four = static_cast<std::uint64_t>(_mm256_extract_epi64(fours, 0));
      const auto other_four = static_cast<std::uint64_t>(_mm256_extract_epi64(fours, 2));
      store_word(lows, first_four);
      store_word(lows + width / 2, other_four << odd | (first_four >> carry & carried));
    }
  }
  lows_portable(numbers + j, count - j, before + static_cast<std::uint32_t>(j), width, lows);
}

// One bit per position; those of a group lie in two neighbouring words, but for wide gaps.
TELEGRAD_AVX2 std::uint64_t joined_avx2(__m256i a, __m256i b) {
  const __m256i both = _mm256_or_si256(a, b);
  const __m128i half = _mm_or_si128(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(half) | _mm_extract_epi64(half, 1));
}

TELEGRAD_AVX2 void highs_avx2(const std::uint32_t* numbers, std::size_t count, std::uint32_t before, unsigned width,
                              std::byte* highs) {
  const __m256i one = _mm256_set1_epi64x(1);
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(width));
  __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  HighWords words(highs);
  std::size_t j = 0;
  for (; j + 8 <= count; j += 8) {
    const __m256i at = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers + j));
    const __m256i skipped = _mm256_add_epi32(index, _mm256_set1_epi32(static_cast<int>(before + 1)));
    const __m256i bits = _mm256_add_epi32(_mm256_srl_epi32(_mm256_sub_epi32(at, skipped), shift), index);
    index = _mm256_add_epi32(index, _mm256_set1_epi32(8));
    if (!words.reaches(static_cast<std::uint32_t>(_mm256_extract_epi32(bits, 7)))) {
      words.set_each(numbers, j, j + 8, before, width);
      continue;
    }
    const __m256i begin = _mm256_set1_epi32(static_cast<int>(words.first_bit()));
    const __m256i within = _mm256_sub_epi32(bits, begin);
    const __m256i low = _mm256_cvtepu32_epi64(_mm256_castsi256_si128(within));
    const __m256i high = _mm256_cvtepu32_epi64(_mm256_extracti128_si256(within, 1));
    const __m256i next = _mm256_set1_epi64x(64);  // shifts by less than 0 or more than 63 give no bit
    words.set(joined_avx2(_mm256_sllv_epi64(one, low), _mm256_sllv_epi64(one, high)),
              joined_avx2(_mm256_sllv_epi64(one, _mm256_sub_epi64(low, next)),
                          _mm256_sllv_epi64(one, _mm256_sub_epi64(high, next))),
              static_cast<std::uint32_t>(_mm256_extract_epi32(bits, 7)));
  }
  words.set_each(numbers, j, count, before, width);
  words.finish();
}

TELEGRAD_AVX512 void highs_avx512(const std::uint32_t* numbers, std::size_t count, std::uint32_t before,
                                  unsigned width, std::byte* highs) {
  const __m512i one = _mm512_set1_epi64(1);
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(width));
  __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  HighWords words(highs);
  std::size_t j = 0;
  for (; j + 16 <= count; j += 16) {
    const __m512i at = _mm512_loadu_si512(numbers + j);
    const __m512i skipped = _mm512_add_epi32(index, _mm512_set1_epi32(static_cast<int>(before + 1)));
    const __m512i bits = _mm512_add_epi32(_mm512_srl_epi32(_mm512_sub_epi32(at, skipped), shift), index);
    index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
    const auto last = static_cast<std::uint32_t>(_mm_extract_epi32(_mm512_extracti32x4_epi32(bits, 3), 3));
    if (!words.reaches(last)) {
      words.set_each(numbers, j, j + 16, before, width);
      continue;
    }
    const __m512i within = _mm512_sub_epi32(bits, _mm512_set1_epi32(static_cast<int>(words.first_bit())));
    const __m512i low = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(within));
    const __m512i high = _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(within, 1));
    const __m512i next = _mm512_set1_epi64(64);  // shifts by less than 0 or more than 63 give no bit
    const __m512i here = _mm512_or_si512(_mm512_sllv_epi64(one, low), _mm512_sllv_epi64(one, high));
    const __m512i there = _mm512_or_si512(_mm512_sllv_epi64(one, _mm512_sub_epi64(low, next)),
                                          _mm512_sllv_epi64(one, _mm512_sub_epi64(high, next)));
    words.set(static_cast<std::uint64_t>(_mm512_reduce_or_epi64(here)),
              static_cast<std::uint64_t>(_mm512_reduce_or_epi64(there)), last);
  }
  words.set_each(numbers, j, count, before, width);
  words.finish();
}

constexpr Variants<LowsFunction> kLows{lows_portable, lows_avx2};
constexpr Variants<HighsFunction> kHighs{highs_portable, highs_avx2, highs_avx512};

#else

constexpr Variants<LowsFunction> kLows{lows_portable};
constexpr Variants<HighsFunction> kHighs{highs_portable};

#endif

}  // namespace

void elias_fano_encode(std::span<const std::uint32_t> numbers, std::uint32_t before, unsigned width, std::byte* lows,
                       std::byte* highs, std::size_t high_bytes) {
  TELEGRAD_CHECK(numbers.size() <= kEliasFanoMost && width <= 31);
  if (numbers.empty()) return;
  if (width != 0) kLows(numbers.data(), numbers.size(), before, width, lows);
  std::memset(highs, 0, high_bytes);
  kHighs(numbers.data(), numbers.size(), before, width, highs);
}

namespace {

using DecodeFunction = bool(const std::byte* lows, const std::byte* highs, std::size_t high_bytes,
                            std::uint32_t before, unsigned width, std::uint32_t* numbers, std::size_t count);

// Word `at` of a section; bits beyond its end are zero.
std::uint64_t section_word(const std::byte* section, std::size_t bytes, std::size_t at) {
  const std::uint64_t word = load_word(section + at);
  return bytes - at >= 8 ? word : word & low_bits(8 * (bytes - at));
}

bool decode_portable(const std::byte* lows, const std::byte* highs, std::size_t high_bytes, std::uint32_t before,
                     unsigned width, std::uint32_t* numbers, std::size_t count) {
  std::size_t j = 0;
  for (std::size_t at = 0; at < high_bytes; at += 8) {
    for (std::uint64_t word = section_word(highs, high_bytes, at); word != 0; word &= word - 1) {
      if (j == count) return false;
      const std::size_t high = 8 * at + static_cast<std::size_t>(std::countr_zero(word)) - j;
      const std::uint64_t low = load_word(lows + j * width / 8) >> j * width % 8 & low_bits(width);
      numbers[j] = static_cast<std::uint32_t>(before + 1 + j + (high << width | low));
      ++j;
    }
  }
  return j == count;
}

#ifdef TELEGRAD_KERNELS_X86

// Of the set bits; the last store, of a whole vector, goes beyond them.
using Positions = std::uint32_t[kEliasFanoMost + 16];

TELEGRAD_AVX2 bool positions_avx2(const std::byte* highs, std::size_t high_bytes, std::size_t count,
                                  Positions& positions) {
  std::size_t found = 0;
  for (std::size_t at = 0; at < high_bytes; at += 8) {
    std::uint64_t word = section_word(highs, high_bytes, at);
    if (found + static_cast<std::size_t>(std::popcount(word)) > count) return false;
    for (std::size_t bit = 8 * at; word != 0; word >>= 8, bit += 8) {
      const __m256i places = widened8(kByteBits.places[word & 255]);
      const __m256i bits = _mm256_add_epi32(places, _mm256_set1_epi32(static_cast<int>(bit)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions + found), bits);
      found += static_cast<std::size_t>(std::popcount(word & 255));
    }
  }
  return found == count;
}

TELEGRAD_AVX512 bool positions_avx512(const std::byte* highs, std::size_t high_bytes, std::size_t count,
                                      Positions& positions) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  std::size_t found = 0;
  for (std::size_t at = 0; at < high_bytes; at += 8) {
    const std::uint64_t word = section_word(highs, high_bytes, at);
    const auto all = static_cast<std::size_t>(std::popcount(word));
    if (found + all > count) return false;
    for (unsigned part = 0; part < 64; part += 16) {
      const __m512i bits = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(8 * at + part)));
      const auto earlier = static_cast<std::size_t>(std::popcount(word & low_bits(part)));
      _mm512_storeu_si512(positions + found + earlier,
                          _mm512_maskz_compress_epi32(static_cast<__mmask16>(word >> part), bits));
    }
    found += all;
  }
  return found == count;
}

TELEGRAD_AVX2 bool decode_avx2(const std::byte* lows, const std::byte* highs, std::size_t high_bytes,
                               std::uint32_t before, unsigned width, std::uint32_t* numbers, std::size_t count) {
  Positions positions;
  if (!positions_avx2(highs, high_bytes, count, positions)) return false;
  // Eight low parts are `width` bytes: each lies in the four bytes `from` and the next four.
  __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i first_bit = _mm256_mullo_epi32(index, _mm256_set1_epi32(static_cast<int>(width)));
  const __m256i from = _mm256_srli_epi32(first_bit, 5);
  const __m256i next = _mm256_add_epi32(from, _mm256_set1_epi32(1));
  const __m256i right = _mm256_and_si256(first_bit, _mm256_set1_epi32(31));
  const __m256i left = _mm256_sub_epi32(_mm256_set1_epi32(32), right);
  const __m256i keep = _mm256_set1_epi32(static_cast<int>(low_bits(width)));
  const __m256i start = _mm256_set1_epi32(static_cast<int>(before + 1));
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(width));
  for (std::size_t j = 0; j < count; j += 8, lows += width) {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lows));
    const __m256i low = _mm256_and_si256(
        keep, _mm256_or_si256(_mm256_srlv_epi32(_mm256_permutevar8x32_epi32(packed, from), right),
                              _mm256_sllv_epi32(_mm256_permutevar8x32_epi32(packed, next), left)));
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(positions + j));
    const __m256i high = _mm256_sll_epi32(_mm256_sub_epi32(bits, index), shift);
    const __m256i number = _mm256_add_epi32(_mm256_add_epi32(start, index), _mm256_or_si256(high, low));
    index = _mm256_add_epi32(index, _mm256_set1_epi32(8));
    if (j + 8 <= count) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers + j), number);
    } else {
      std::uint32_t last[8];
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(last), number);
      std::memcpy(numbers + j, last, (count - j) * sizeof(std::uint32_t));
    }
  }
  return true;
}

TELEGRAD_AVX512 bool decode_avx512(const std::byte* lows, const std::byte* highs, std::size_t high_bytes,
                                   std::uint32_t before, unsigned width, std::uint32_t* numbers, std::size_t count) {
  Positions positions;
  if (!positions_avx512(highs, high_bytes, count, positions)) return false;
  __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i first_bit = _mm512_mullo_epi32(index, _mm512_set1_epi32(static_cast<int>(width)));
  const __m512i from = _mm512_srli_epi32(first_bit, 5);
  const __m512i next = _mm512_add_epi32(from, _mm512_set1_epi32(1));
  const __m512i right = _mm512_and_si512(first_bit, _mm512_set1_epi32(31));
  const __m512i left = _mm512_sub_epi32(_mm512_set1_epi32(32), right);
  const __m512i keep = _mm512_set1_epi32(static_cast<int>(low_bits(width)));
  const __m512i start = _mm512_set1_epi32(static_cast<int>(before + 1));
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(width));
  for (std::size_t j = 0; j < count; j += 16, lows += 2 * width) {
    const __m512i packed = _mm512_loadu_si512(lows);
    const __m512i low = _mm512_and_si512(
        keep, _mm512_or_si512(_mm512_srlv_epi32(_mm512_permutexvar_epi32(from, packed), right),
                              _mm512_sllv_epi32(_mm512_permutexvar_epi32(next, packed), left)));
    const __m512i bits = _mm512_loadu_si512(positions + j);
    const __m512i high = _mm512_sll_epi32(_mm512_sub_epi32(bits, index), shift);
    const __m512i number = _mm512_add_epi32(_mm512_add_epi32(start, index), _mm512_or_si512(high, low));
    index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
    const std::size_t left_over = count - j;
    const auto mask = static_cast<__mmask16>(left_over >= 16 ? 0xffffU : low_bits(left_over));
    _mm512_mask_storeu_epi32(numbers + j, mask, number);
  }
  return true;
}

constexpr Variants<DecodeFunction> kDecode{decode_portable, decode_avx2, decode_avx512};

#else

constexpr Variants<DecodeFunction> kDecode{decode_portable};

#endif

}  // namespace

bool elias_fano_decode(const std::byte* lows, const std::byte* highs, std::size_t high_bytes, std::uint32_t before,
                       unsigned width, std::span<std::uint32_t> numbers) {
  TELEGRAD_CHECK(numbers.size() <= kEliasFanoMost && width <= 31);
  return kDecode(lows, highs, high_bytes, before, width, numbers.data(), numbers.size());
}

}  // namespace telegrad::kernels

// Bit by bit, for tests.
namespace telegrad::kernels::reference {
namespace {

bool bit_at(const std::byte* section, std::size_t bit) {
  return (std::to_integer<unsigned>(section[bit / 8]) >> bit % 8 & 1U) != 0;
}
void set_bit(std::byte* section, std::size_t bit) { section[bit / 8] |= std::byte{1} << bit % 8; }

}  // namespace

void elias_fano_encode(std::span<const std::uint32_t> numbers, std::uint32_t before, unsigned width, std::byte* lows,
                       std::byte* highs, std::size_t high_bytes) {
  for (std::size_t i = 0; i < (numbers.size() * width + 7) / 8; ++i) lows[i] = std::byte{0};
  for (std::size_t i = 0; i < high_bytes; ++i) highs[i] = std::byte{0};
  for (std::size_t j = 0; j < numbers.size(); ++j) {
    const auto offset = static_cast<std::uint32_t>(numbers[j] - before - 1 - j);
    for (unsigned i = 0; i < width; ++i) {
      if ((offset >> i & 1U) != 0) set_bit(lows, j * width + i);
    }
    set_bit(highs, (offset >> width) + j);
  }
}

bool elias_fano_decode(const std::byte* lows, const std::byte* highs, std::size_t high_bytes, std::uint32_t before,
                       unsigned width, std::span<std::uint32_t> numbers) {
  std::size_t j = 0;
  for (std::size_t bit = 0; bit < 8 * high_bytes; ++bit) {
    if (!bit_at(highs, bit)) continue;
    if (j == numbers.size()) return false;
    auto offset = static_cast<std::uint32_t>(bit - j) << width;
    for (unsigned i = 0; i < width; ++i) offset |= (bit_at(lows, j * width + i) ? 1U : 0U) << i;
    numbers[j] = before + 1 + static_cast<std::uint32_t>(j) + offset;
    ++j;
  }
  return j == numbers.size();
}

}  // namespace telegrad::kernels::reference
