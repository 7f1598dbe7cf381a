#include "kernels/elias_fano.hpp"

#include <cstring>

#include "base/check.hpp"
#include "kernels/dispatch.hpp"

namespace telegrad::kernels {
namespace {

// Both may write kEliasFanoSlackBytes behind their section; that of the high bits finds zeros there.
using LowsFunction = void(const std::uint32_t* numbers, std::size_t count, std::uint32_t before, unsigned width,
                          std::byte* lows);
using HighsFunction = void(const std::uint32_t* numbers, std::size_t count, std::uint32_t before, unsigned width,
                           std::byte* highs);
using DecodeFunction = bool(const std::byte* lows, const std::byte* highs, std::size_t high_bytes,
                            std::uint32_t before, unsigned width, std::uint32_t* numbers, std::size_t count);

std::uint64_t load_word(const std::byte* from) {
  std::uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

void store_word(std::byte* to, std::uint64_t word) { std::memcpy(to, &word, sizeof word); }

constexpr std::uint64_t low_bits(std::size_t count) { return (std::uint64_t{1} << count) - 1; }

// Word `at` of a section; bits beyond its end are zero.
std::uint64_t section_word(const std::byte* section, std::size_t bytes, std::size_t at) {
  const std::uint64_t word = load_word(section + at);
  return bytes - at >= 8 ? word : word & low_bits(8 * (bytes - at));
}

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

void highs_portable(const std::uint32_t* numbers, std::size_t count, std::uint32_t before, unsigned width,
                    std::byte* highs) {
  std::uint64_t word = 0;
  std::size_t at = 0;
  for (std::size_t j = 0; j < count; ++j) {
    const std::size_t bit = (offset_of(numbers, j, before) >> width) + j;
    if (bit / 64 != at) {
      store_word(highs + 8 * at, word);
      at = bit / 64;
      word = 0;
    }
    word |= std::uint64_t{1} << bit % 64;
  }
  store_word(highs + 8 * at, word);
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

constexpr Variants<LowsFunction> kLows{lows_portable};
constexpr Variants<HighsFunction> kHighs{highs_portable};
constexpr Variants<DecodeFunction> kDecode{decode_portable};

}  // namespace

void elias_fano_encode(std::span<const std::uint32_t> numbers, std::uint32_t before, unsigned width, std::byte* lows,
                       std::byte* highs, std::size_t high_bytes) {
  TELEGRAD_CHECK(numbers.size() <= kEliasFanoMost && width <= 31);
  if (numbers.empty()) return;
  if (width != 0) kLows(numbers.data(), numbers.size(), before, width, lows);
  std::memset(highs, 0, high_bytes);
  kHighs(numbers.data(), numbers.size(), before, width, highs);
}

bool elias_fano_decode(const std::byte* lows, const std::byte* highs, std::size_t high_bytes, std::uint32_t before,
                       unsigned width, std::span<std::uint32_t> numbers) {
  TELEGRAD_CHECK(numbers.size() <= kEliasFanoMost && width <= 31);
  return kDecode(lows, highs, high_bytes, before, width, numbers.data(), numbers.size());
}

namespace reference {
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

}  // namespace reference

}  // namespace telegrad::kernels
