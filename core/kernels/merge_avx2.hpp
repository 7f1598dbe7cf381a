#pragma once
// Two sorted runs to one by AVX2, for values of at most 32 bits; for merge.cpp alone.
//
// Indices alone are merged, each with a bit that says which run it is of: as many of the run whose next index is smaller as fit a
// vector with the eight largest so far, by a bitonic network (Batcher, "Sorting networks and their applications", 1968). The
// eight smallest are then in their place. Values follow, as each run's come in its own order. An index that both inputs
// have comes twice, next to one another and a's first.
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
#include <type_traits>
#include <utility>

#include "kernels/entries.hpp"
#include "kernels/operations.hpp"
#include "kernels/pack_avx2.hpp"

namespace telegrad::kernels {

/// values[i] = values[i] ∘ others[i], of which there are a multiple of eight. Long loops, which the compiler makes vectors of.
template <class Combine, std::size_t kMost, class V>
TELEGRAD_AVX2 inline void reduce_batch(V* values, const V* others, std::size_t count) {
  if constexpr (std::same_as<V, f16>) {  // computed in f32 and rounded once, as everywhere, but by the instructions for it
    alignas(32) std::array<float, kMost> left, right;
    for (std::size_t i = 0; i < count; i += 8) {
      _mm256_store_ps(left.data() + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i))));
      _mm256_store_ps(right.data() + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(others + i))));
    }
    reduce_batch<Combine, kMost>(left.data(), right.data(), count);
    for (std::size_t i = 0; i < count; i += 8) {
      const __m128i halves = _mm256_cvtps_ph(_mm256_load_ps(left.data() + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(values + i), halves);
    }
  } else {
    for (std::size_t i = 0; i < count; ++i) values[i] = Combine::of(values[i], others[i]);
  }
}

/// Merges two runs' beginnings batch by batch.
template <class Combine, class V>
class EightsMerge {
  static_assert(sizeof(V) <= 4);

 public:
  EightsMerge(Entries<V> a, Entries<V> b, EntriesOut<V> out) : a_(a), b_(b), out_(out) {}

  /// As merge_beginning_avx2() says.
  TELEGRAD_AVX2 std::size_t run() {
    const std::uint32_t first = std::min(a_.indices.front(), b_.indices.front());
    if (std::max(a_.indices.back(), b_.indices.back()) - first > kIndexMost) return 0;
    first_ = first;
    largest_ = _mm256_slli_epi32(_mm256_sub_epi32(load8(a_.indices.data()), _mm256_set1_epi32(static_cast<int>(first))), 1);
    next_a_ = kEight;
    std::size_t count = 0;
    std::size_t held = 0;  // keys in the batch, of which the first ones have their values
    while (goes_on()) {
      const std::size_t valued = std::exchange(held, merge_keys(held));
      place_values(valued, held);
      const std::size_t whole = held - kEight;
      count = write_once(whole, count);
      std::copy_n(keys_.data() + whole, kEight, keys_.data());
      std::copy_n(values_.data() + whole, kEight, values_.data());
      held = kEight;
    }
    return count;
  }

 private:
  static constexpr std::size_t kEight = 8;
  static constexpr std::size_t kBatch = 1024;
  static constexpr std::uint32_t kIndexMost = 0x7fffffff;  // from the first one: a key has a bit more

  // Sixteen are left of each run: values are read in eights, of which some may lie beyond those that are wanted.
  bool goes_on() const { return next_a_ + 2 * kEight <= a_.size() && next_b_ + 2 * kEight <= b_.size(); }

  // Keys that rise and then fall, or fall and then rise, sorted.
  TELEGRAD_AVX2 static __m256i sort_bitonic(__m256i keys) {
    __m256i other = _mm256_permute2x128_si256(keys, keys, 0x01);
    keys = _mm256_blend_epi32(_mm256_min_epu32(keys, other), _mm256_max_epu32(keys, other), 0xf0);
    other = _mm256_shuffle_epi32(keys, 0x4e);
    keys = _mm256_blend_epi32(_mm256_min_epu32(keys, other), _mm256_max_epu32(keys, other), 0xcc);
    other = _mm256_shuffle_epi32(keys, 0xb1);
    return _mm256_blend_epi32(_mm256_min_epu32(keys, other), _mm256_max_epu32(keys, other), 0xaa);
  }

  // Fills the batch up, as far as the runs go; returns how many keys it holds then. Which run is next is a coin toss: no branch.
  TELEGRAD_AVX2 std::size_t merge_keys(std::size_t held) {
    const std::uint32_t* next_a = a_.indices.data() + next_a_;
    const std::uint32_t* next_b = b_.indices.data() + next_b_;
    const std::uint32_t* const end_a = a_.indices.data() + a_.size() - 2 * kEight;  // see goes_on()
    const std::uint32_t* const end_b = b_.indices.data() + b_.size() - 2 * kEight;
    const __m256i first = _mm256_set1_epi32(static_cast<int>(first_));
    const __m256i backwards = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    __m256i largest = largest_;
    for (; held < keys_.size() && next_a <= end_a && next_b <= end_b; held += kEight) {
      const auto of_b = static_cast<std::uint32_t>(*next_b < *next_a);
      const __m256i from_a = load8(next_a);
      const __m256i from_b = load8(next_b);
      const __m256i is_b = _mm256_set1_epi32(-static_cast<int>(of_b));
      const __m256i offsets = _mm256_sub_epi32(_mm256_blendv_epi8(from_a, from_b, is_b), first);
      next_a += kEight & (of_b - 1U);
      next_b += kEight & (0U - of_b);
      const __m256i keys = _mm256_sub_epi32(_mm256_slli_epi32(offsets, 1), is_b);
      const __m256i turned = _mm256_permutevar8x32_epi32(keys, backwards);
      store8(keys_.data() + held, sort_bitonic(_mm256_min_epu32(largest, turned)));
      largest = sort_bitonic(_mm256_max_epu32(largest, turned));
    }
    largest_ = largest;
    next_a_ = static_cast<std::size_t>(next_a - a_.indices.data());
    next_b_ = static_cast<std::size_t>(next_b - b_.indices.data());
    return held;
  }

  TELEGRAD_AVX2 static __m256i load_values(const V* values) {
    if constexpr (sizeof(V) == 4) return load8(values);
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
  }
  TELEGRAD_AVX2 static void store_values(V* to, __m256i values) {
    if constexpr (sizeof(V) == 4) {
      store8(to, values);
    } else {
      const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(values, values), 0x08);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(halves));
    }
  }

  // Of the keys from `begin` to `end`.
  TELEGRAD_AVX2 void place_values(std::size_t begin, std::size_t end) {
    const V* from_a = a_.values.data() + placed_a_;
    const V* from_b = b_.values.data() + placed_b_;
    for (std::size_t at = begin; at < end; at += kEight) {
      const __m256i of_b = _mm256_slli_epi32(load8(keys_.data() + at), 31);
      const std::uint32_t lanes_b = mask_of_lanes(of_b);
      const __m256i a = expand8(load_values(from_a), ~lanes_b & 0xffU);
      const __m256i b = expand8(load_values(from_b), lanes_b);
      store_values(values_.data() + at, _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b),
                                                                           _mm256_castsi256_ps(of_b))));
      const auto count_b = static_cast<std::size_t>(std::popcount(lanes_b));
      from_a += kEight - count_b;
      from_b += count_b;
    }
    placed_a_ = static_cast<std::size_t>(from_a - a_.values.data());
    placed_b_ = static_cast<std::size_t>(from_b - b_.values.data());
  }

  // The entries of the first `whole` keys, each index once, behind `count` others; one key more is looked at. Returns how many there
  // are then.
  TELEGRAD_AVX2 std::size_t write_once(std::size_t whole, std::size_t count) {
    constexpr V kNeutral = Combine::template kNeutral<V>;
    constexpr auto kNeutralBits = std::bit_cast<std::make_unsigned_t<typename Format<V>::Bits>>(kNeutral);
    const __m256i neutral = _mm256_set1_epi32(static_cast<int>(kNeutralBits));
    alignas(32) std::array<V, kBatch> sums, twins;
    std::array<std::uint8_t, kBatch / kEight> kept;
    std::array<std::uint16_t, kBatch / kEight> begins;
    std::size_t written = 0;
    for (std::size_t at = 0; at < whole; at += kEight) {
      const __m256i here = _mm256_srli_epi32(load8(keys_.data() + at), 1);
      const __m256i next = _mm256_srli_epi32(load8(keys_.data() + at + 1), 1);
      const __m256i repeats = _mm256_cmpeq_epi32(here, next);
      const std::uint32_t same = mask_of_lanes(repeats);
      const auto keeps = static_cast<std::uint8_t>(~(same << 1 | (repeated_ ? 1U : 0U)));
      repeated_ = (same & 0x80U) != 0;
      kept[at / kEight] = keeps;
      begins[at / kEight] = static_cast<std::uint16_t>(written);
      written += static_cast<std::size_t>(std::popcount(keeps));
      store_values(sums.data() + at, load_values(values_.data() + at));
      store_values(twins.data() + at, _mm256_blendv_epi8(neutral, load_values(values_.data() + at + 1), repeats));
    }
    reduce_batch<Combine, kBatch>(sums.data(), twins.data(), whole);
    std::uint32_t* const indices = out_.indices.data() + count;
    V* const values = out_.values.data() + count;
    const __m256i first = _mm256_set1_epi32(static_cast<int>(first_));
    for (std::size_t at = 0; at < whole; at += kEight) {
      const __m256i places = _mm256_add_epi32(_mm256_srli_epi32(load8(keys_.data() + at), 1), first);
      const std::size_t begin = begins[at / kEight];
      store8(indices + begin, pack8(places, kept[at / kEight]));
      store_values(values + begin, pack8(load_values(sums.data() + at), kept[at / kEight]));
    }
    return count + written;
  }

  const Entries<V> a_;
  const Entries<V> b_;
  const EntriesOut<V> out_;
  std::uint32_t first_ = 0;
  __m256i largest_ = {};
  std::size_t next_a_ = 0;  // to become keys
  std::size_t next_b_ = 0;
  std::size_t placed_a_ = 0;  // with their values
  std::size_t placed_b_ = 0;
  bool repeated_ = false;  // whether the first key's index is already written
  alignas(32) std::array<std::uint32_t, kBatch + kEight> keys_;
  alignas(32) std::array<V, kBatch + 2 * kEight> values_;
};

/// Merges a beginning of both runs, and leaves at least 8 entries of the output to be merged. Returns the number of
/// entries written: they are all that have an index up to the last one's. Writes nothing that is not overwritten by the
/// rest. Nothing where the runs' indices span 2^31 or more.
template <class Combine, class V>
std::size_t merge_beginning_avx2(Entries<V> a, Entries<V> b, EntriesOut<V> out) {
  if (a.size() < 16 || b.size() < 16) return 0;
  return EightsMerge<Combine, V>(a, b, out).run();
}

}  // namespace telegrad::kernels

#endif
