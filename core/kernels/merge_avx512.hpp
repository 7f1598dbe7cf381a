#pragma once
// Two sorted runs to one by AVX-512, for values of at most 32 bits; for merge.cpp alone.
//
// An entry is one 64-bit key, its index above its value, so that comparing keys moves values along. Eight keys of the
// input whose next index is smaller are merged with the eight largest so far by a bitonic network (Batcher, "Sorting
// networks and their applications", 1968); the eight smallest are then in their place. An index that both inputs have
// comes twice, next to one another and in either order, which is the same to every reduction.
//
// Work goes in batches, and in each all places of the output are known before the first is written: a store to an
// address that is still to be computed would hold up every load behind it.

#include "kernels/dispatch.hpp"

#ifdef TELEGRAD_KERNELS_X86
#include "kernels/intrinsics.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/entries.hpp"
#include "kernels/operations.hpp"

namespace telegrad::kernels {

inline constexpr std::size_t kKeys = 8;         // in a vector
inline constexpr std::size_t kBatchKeys = 1024;

template <class V>
TELEGRAD_AVX512 inline __m512i load_keys(const std::uint32_t* indices, const V* values) {
  constexpr __mmask8 kAll = 0xff;  // GCC 12 takes the forms without a mask for uninitialised
  const __m512i high =
      _mm512_maskz_cvtepu32_epi64(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(indices)));
  const __m512i low =
      sizeof(V) == 4
          ? _mm512_maskz_cvtepu32_epi64(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)))
          : _mm512_maskz_cvtepu16_epi64(kAll, _mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
  return _mm512_or_si512(_mm512_maskz_slli_epi64(kAll, high, 32), low);
}

// Keys that rise and then fall, or fall and then rise, sorted.
TELEGRAD_AVX512 inline __m512i sort_bitonic(__m512i keys) {
  constexpr __mmask8 kAll = 0xff;
  __m512i other = _mm512_maskz_shuffle_i64x2(kAll, keys, keys, 0x4e);
  keys = _mm512_mask_max_epu64(_mm512_maskz_min_epu64(kAll, keys, other), 0xf0, keys, other);
  other = _mm512_maskz_permutex_epi64(kAll, keys, 0x4e);
  keys = _mm512_mask_max_epu64(_mm512_maskz_min_epu64(kAll, keys, other), 0xcc, keys, other);
  other = _mm512_maskz_shuffle_epi32(0xffff, keys, _MM_PERM_BADC);
  return _mm512_mask_max_epu64(_mm512_maskz_min_epu64(kAll, keys, other), 0xaa, keys, other);
}

// one[k] = one[k] ∘ other[k]. f16 is computed in f32 and rounded once, as everywhere, but by the instructions for it.
template <class Combine, NarrowFloat V>
TELEGRAD_AVX512 inline void reduce_narrow(std::array<V, kKeys>& one, const std::array<V, kKeys>& other) {
  if constexpr (std::same_as<V, f16>) {
    const auto wide = [](const std::array<V, kKeys>& halves) TELEGRAD_AVX512 {
      return std::bit_cast<std::array<float, kKeys>>(
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves.data()))));
    };
    std::array<float, kKeys> left = wide(one);
    const std::array<float, kKeys> right = wide(other);
    for (std::size_t k = 0; k < kKeys; ++k) left[k] = Combine::of(left[k], right[k]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(one.data()),
                     _mm256_cvtps_ph(_mm256_loadu_ps(left.data()), _MM_FROUND_TO_NEAREST_INT));
  } else {
    for (std::size_t k = 0; k < kKeys; ++k) one[k] = Combine::of(one[k], other[k]);
  }
}

// Writes the entries of `vectors` sorted vectors of keys, each index once. `keys` has one vector more, of which only
// the first key is looked at. `repeated`: whether the first key's index is already written. Returns how many entries.
template <class Combine, class V>
TELEGRAD_AVX512 inline std::size_t write_once(const std::uint64_t* keys, std::size_t vectors, bool& repeated,
                                              std::uint32_t* indices, V* values) {
  constexpr __mmask8 kAll = 0xff;
  std::array<std::uint8_t, kBatchKeys / kKeys> same, kept;
  std::array<std::uint16_t, kBatchKeys / kKeys> begins;
  std::size_t count = 0;
  for (std::size_t i = 0; i < vectors; ++i) {
    const __m512i here = _mm512_loadu_si512(keys + i * kKeys);
    const __m512i next = _mm512_loadu_si512(keys + i * kKeys + 1);
    // Equal indices: the exclusive or has no bit above the value.
    same[i] = _mm512_testn_epi64_mask(_mm512_xor_si512(here, next),
                                      _mm512_set1_epi64(static_cast<long long>(0xffffffff00000000ULL)));
    kept[i] = static_cast<std::uint8_t>(~(same[i] << 1 | (repeated ? 1 : 0)));
    repeated = (same[i] & 0x80) != 0;
    begins[i] = static_cast<std::uint16_t>(count);
    count += static_cast<std::size_t>(__builtin_popcount(kept[i]));
  }
  for (std::size_t i = 0; i < vectors; ++i) {
    const __m512i here = _mm512_loadu_si512(keys + i * kKeys);
    const __m512i next = _mm512_loadu_si512(keys + i * kKeys + 1);
    const __m256i places = _mm512_maskz_cvtepi64_epi32(kAll, _mm512_maskz_srli_epi64(kAll, here, 32));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(indices + begins[i]), _mm256_maskz_compress_epi32(kept[i], places));
    constexpr auto kNeutral = std::bit_cast<typename Format<V>::Bits>(Combine::template kNeutral<V>);
    const __m512i twin = _mm512_mask_mov_epi64(_mm512_set1_epi64(kNeutral), same[i], next);
    std::array<V, kKeys> one, other;
    if constexpr (sizeof(V) == 4) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(one.data()), _mm512_maskz_cvtepi64_epi32(kAll, here));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(other.data()), _mm512_maskz_cvtepi64_epi32(kAll, twin));
      for (std::size_t k = 0; k < kKeys; ++k) one[k] = Combine::of(one[k], other[k]);
      const __m256i results = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(one.data()));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + begins[i]),
                          _mm256_maskz_compress_epi32(kept[i], results));
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(one.data()), _mm512_maskz_cvtepi64_epi16(kAll, here));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(other.data()), _mm512_maskz_cvtepi64_epi16(kAll, twin));
      reduce_narrow<Combine>(one, other);
      const __m256i results =
          _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(one.data())));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(values + begins[i]),
                       _mm256_maskz_cvtepi32_epi16(kAll, _mm256_maskz_compress_epi32(kept[i], results)));
    }
  }
  return count;
}

/// Merges a beginning of both runs, and leaves at least 8 entries of the output to be merged. Returns the number of
/// entries written: they are all that have an index up to the last one's. Writes nothing that is not overwritten by the
/// rest.
template <class Combine, class V>
TELEGRAD_AVX512 std::size_t merge_keys(Entries<V> a, Entries<V> b, EntriesOut<V> out) {
  static_assert(sizeof(V) <= 4);
  constexpr __mmask8 kAll = 0xff;
  if (a.size() < 2 * kKeys || b.size() < 2 * kKeys) return 0;
  alignas(64) std::array<std::uint64_t, kBatchKeys + kKeys> keys;
  const __m512i backwards = _mm512_setr_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  __m512i largest = load_keys(a.indices.data(), a.values.data());
  std::size_t i = kKeys;
  std::size_t j = 0;
  std::size_t count = 0;
  std::size_t held = 0;  // keys in the batch
  bool repeated = false;
  while (i + kKeys <= a.size() && j + kKeys <= b.size()) {
    while (held < keys.size() && i + kKeys <= a.size() && j + kKeys <= b.size()) {
      const bool from_a = a.indices[i] <= b.indices[j];
      const __m512i next = load_keys(from_a ? a.indices.data() + i : b.indices.data() + j,
                                     from_a ? a.values.data() + i : b.values.data() + j);
      i += from_a ? kKeys : 0;
      j += from_a ? 0 : kKeys;
      const __m512i turned = _mm512_maskz_permutexvar_epi64(kAll, backwards, next);
      _mm512_store_si512(keys.data() + held, sort_bitonic(_mm512_maskz_min_epu64(kAll, largest, turned)));
      largest = sort_bitonic(_mm512_maskz_max_epu64(kAll, largest, turned));
      held += kKeys;
    }
    const std::size_t whole = held - kKeys;
    count += write_once<Combine>(keys.data(), whole / kKeys, repeated, out.indices.data() + count,
                                   out.values.data() + count);
    std::copy_n(keys.data() + whole, kKeys, keys.data());
    held = kKeys;
  }
  return count;
}

}  // namespace telegrad::kernels

#endif
