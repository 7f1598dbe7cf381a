// Bit by bit, for tests.
#include "codec/elias_fano.hpp"

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
