#include "kernels/scan.hpp"

#include <bit>
#include <cstring>

#include "base/check.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/intrinsics.hpp"

namespace telegrad::kernels {
namespace {

using CountFunction = std::size_t(const std::byte* values, std::size_t count);
using OrderFunction = bool(const std::uint32_t* indices, std::size_t count);

// An element is not finite when all bits of its exponent are set.
constexpr std::uint32_t exponent_of(std::uint32_t) { return 0x7f800000U; }
constexpr std::uint16_t exponent_of(std::uint16_t) { return 0x7f80U; }

template <class Word>
std::size_t count_tail(const std::byte* values, std::size_t first, std::size_t count) {
  std::size_t found = 0;
  for (std::size_t i = first; i < count; ++i) {
    Word word;
    std::memcpy(&word, values + i * sizeof(Word), sizeof word);
    found += (word & exponent_of(Word{})) == exponent_of(Word{}) ? 1 : 0;
  }
  return found;
}

template <class Word>
std::size_t count_portable(const std::byte* values, std::size_t count) {
  constexpr std::size_t kBlock = 64;
  std::size_t found = 0;
  std::size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    Word block[kBlock];
    std::memcpy(block, values + i * sizeof(Word), sizeof block);
    Word in_block = 0;
    for (std::size_t j = 0; j < kBlock; ++j) {
      in_block = static_cast<Word>(in_block + ((block[j] & exponent_of(Word{})) == exponent_of(Word{})));
    }
    found += in_block;
  }
  return found + count_tail<Word>(values, i, count);
}

bool order_tail(const std::uint32_t* indices, std::size_t first, std::size_t count) {
  for (std::size_t i = first; i + 1 < count; ++i) {
    if (indices[i] >= indices[i + 1]) return false;
  }
  return true;
}

bool order_portable(const std::uint32_t* indices, std::size_t count) {
  constexpr std::size_t kBlock = 64;
  std::size_t i = 0;
  for (; i + kBlock + 1 <= count; i += kBlock) {
    std::uint32_t bad = 0;
    for (std::size_t j = i; j < i + kBlock; ++j) bad |= indices[j] >= indices[j + 1] ? 1U : 0U;
    if (bad != 0) return false;
  }
  return order_tail(indices, i, count);
}

#ifdef TELEGRAD_KERNELS_X86

TELEGRAD_AVX2 inline __m256i load_avx2(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

TELEGRAD_AVX2 inline unsigned byte_mask_avx2(__m256i equal) {
  return static_cast<unsigned>(_mm256_movemask_epi8(equal));
}

// From the last element to the first: gradients are looked at as soon as they are written, when their end is in the nearest
// caches, and then added from the first one on, which this leaves there.
TELEGRAD_AVX2 std::size_t count_f32_avx2(const std::byte* values, std::size_t count) {
  const __m256i exponent = _mm256_set1_epi32(0x7f800000);
  std::size_t i = count / 16 * 16;
  const std::size_t found = count_tail<std::uint32_t>(values, i, count);
  std::size_t set_bytes = 0;
  while (i != 0) {
    i -= 16;
    const __m256i low = _mm256_cmpeq_epi32(_mm256_and_si256(load_avx2(values + i * 4), exponent), exponent);
    const __m256i high = _mm256_cmpeq_epi32(_mm256_and_si256(load_avx2(values + i * 4 + 32), exponent), exponent);
    if (_mm256_testz_si256(_mm256_or_si256(low, high), _mm256_set1_epi32(-1))) continue;
    set_bytes += static_cast<std::size_t>(std::popcount(byte_mask_avx2(low)) + std::popcount(byte_mask_avx2(high)));
  }
  return found + set_bytes / 4;
}

TELEGRAD_AVX2 std::size_t count_bf16_avx2(const std::byte* values, std::size_t count) {
  const __m256i exponent = _mm256_set1_epi16(0x7f80);
  std::size_t i = count / 16 * 16;
  const std::size_t found = count_tail<std::uint16_t>(values, i, count);
  std::size_t set_bytes = 0;
  while (i != 0) {
    i -= 16;
    const __m256i equal = _mm256_cmpeq_epi16(_mm256_and_si256(load_avx2(values + i * 2), exponent), exponent);
    set_bytes += static_cast<std::size_t>(std::popcount(byte_mask_avx2(equal)));
  }
  return found + set_bytes / 2;
}

TELEGRAD_AVX512 std::size_t count_f32_avx512(const std::byte* values, std::size_t count) {
  const __m512i exponent = _mm512_set1_epi32(0x7f800000);
  std::size_t i = count / 32 * 32;
  std::size_t found = count_tail<std::uint32_t>(values, i, count);
  while (i != 0) {
    i -= 32;
    const __m512i low = _mm512_and_si512(_mm512_loadu_si512(values + i * 4), exponent);
    const __m512i high = _mm512_and_si512(_mm512_loadu_si512(values + i * 4 + 64), exponent);
    const __mmask16 low_set = _mm512_cmpeq_epi32_mask(low, exponent);
    const __mmask16 high_set = _mm512_cmpeq_epi32_mask(high, exponent);
    found += static_cast<std::size_t>(std::popcount(static_cast<std::uint32_t>(low_set) << 16 | high_set));
  }
  return found;
}

TELEGRAD_AVX512 std::size_t count_bf16_avx512(const std::byte* values, std::size_t count) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  std::size_t i = count / 32 * 32;
  std::size_t found = count_tail<std::uint16_t>(values, i, count);
  while (i != 0) {
    i -= 32;
    const __m512i block = _mm512_and_si512(_mm512_loadu_si512(values + i * 2), exponent);
    found += static_cast<std::size_t>(std::popcount(_mm512_cmpeq_epi16_mask(block, exponent)));
  }
  return found;
}

// AVX2 compares signed only: flipping the top bit turns unsigned order into signed order.
TELEGRAD_AVX2 bool order_avx2(const std::uint32_t* indices, std::size_t count) {
  const __m256i flip = _mm256_set1_epi32(static_cast<int>(0x80000000U));
  std::size_t i = 0;
  for (; i + 9 <= count; i += 8) {
    const __m256i here = _mm256_xor_si256(load_avx2(indices + i), flip);
    const __m256i next = _mm256_xor_si256(load_avx2(indices + i + 1), flip);
    if (_mm256_movemask_epi8(_mm256_cmpgt_epi32(next, here)) != -1) return false;
  }
  return order_tail(indices, i, count);
}

TELEGRAD_AVX512 bool order_avx512(const std::uint32_t* indices, std::size_t count) {
  std::size_t i = 0;
  for (; i + 17 <= count; i += 16) {
    const __m512i here = _mm512_loadu_si512(indices + i);
    const __m512i next = _mm512_loadu_si512(indices + i + 1);
    if (_mm512_cmplt_epu32_mask(here, next) != 0xffff) return false;
  }
  return order_tail(indices, i, count);
}

constexpr Variants<CountFunction> kCountF32{count_portable<std::uint32_t>, count_f32_avx2, count_f32_avx512};
constexpr Variants<CountFunction> kCountBf16{count_portable<std::uint16_t>, count_bf16_avx2, count_bf16_avx512};
constexpr Variants<OrderFunction> kOrder{order_portable, order_avx2, order_avx512};

#else

constexpr Variants<CountFunction> kCountF32{count_portable<std::uint32_t>};
constexpr Variants<CountFunction> kCountBf16{count_portable<std::uint16_t>};
constexpr Variants<OrderFunction> kOrder{order_portable};

#endif

std::size_t checked_count(DType dtype, std::size_t bytes) {
  TELEGRAD_CHECK(dtype == DType::f32 || dtype == DType::bf16);
  TELEGRAD_CHECK(bytes % size_of(dtype) == 0);
  return bytes / size_of(dtype);
}

}  // namespace

std::size_t count_nonfinite(DType dtype, ConstBytes values) {
  const std::size_t count = checked_count(dtype, values.size());
  const auto& kernel = dtype == DType::f32 ? kCountF32 : kCountBf16;
  return kernel(values.data(), count);
}

bool strictly_increasing(std::span<const std::uint32_t> indices) { return kOrder(indices.data(), indices.size()); }

namespace reference {

std::size_t count_nonfinite(DType dtype, ConstBytes values) {
  const std::size_t count = checked_count(dtype, values.size());
  const auto kernel = dtype == DType::f32 ? count_tail<std::uint32_t> : count_tail<std::uint16_t>;
  return kernel(values.data(), 0, count);
}

bool strictly_increasing(std::span<const std::uint32_t> indices) {
  return order_tail(indices.data(), 0, indices.size());
}

}  // namespace reference

}  // namespace telegrad::kernels
