#include <cstring>

#include "base/check.hpp"
#include "codec/bit_words.hpp"
#include "codec/elias_fano.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/intrinsics.hpp"

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

}  // namespace telegrad::kernels
