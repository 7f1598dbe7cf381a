#pragma once
// Several sorted runs to one by AVX-512, for values of at most 32 bits; for reduce_sorted.cpp (and its test) alone.
//
// An entry is one 64-bit key: its index, the number of its run, its value. Keys of two neighbouring runs are merged as
// merge_avx512.hpp does it, then what comes of two neighbours, and so on; only the last pass reduces those of one index,
// which then follow each other in the order of runs. A merge waits for its last step all the time, so two go on side by
// side. Entries go in chunks, whose keys stay in the cache.

#include "kernels/dispatch.hpp"

#ifdef TELEGRAD_KERNELS_X86
#include "kernels/intrinsics.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "kernels/entries.hpp"
#include "kernels/merge_avx512.hpp"
#include "kernels/operations.hpp"

namespace telegrad::kernels {

inline constexpr std::size_t kChunkEntries = 4096;
inline constexpr std::size_t kWrittenKeys = 256;
inline constexpr std::size_t kEntriesAhead = 1024;  // of the next chunks, which the cache would fetch too late

inline constexpr std::uint64_t kNoKey = ~std::uint64_t{0};  // above every key; at least kKeys of them follow each run

struct KeyRun {
  std::size_t begin = 0;  // in the buffer
  std::size_t size = 0;

  std::size_t vectors() const { return (size + kKeys - 1) / kKeys; }
  std::size_t space() const { return (vectors() + 1) * kKeys; }
};

/// The keys of a chunk of all inputs.
class RunKeys {
 public:
  explicit RunKeys(unsigned run_bits) : run_bits_(run_bits) {}

  template <class V>
  TELEGRAD_AVX512 void take(std::span<const Entries<V>> parts) {
    runs_.clear();
    base_ = 0xffffffffU;
    std::size_t space = 0;
    for (const Entries<V>& part : parts) {
      if (part.empty()) continue;
      base_ = std::min(base_, part.indices.front());
      runs_.push_back({space, part.size()});
      space += runs_.back().space();
    }
    for (Array<std::uint64_t>& keys : keys_) {
      if (keys.size() < space) keys = Array<std::uint64_t>(space);
    }
    std::size_t next = 0;
    for (std::size_t number = 0; number < parts.size(); ++number) {
      if (!parts[number].empty()) fill(parts[number], static_cast<std::uint32_t>(number), runs_[next++]);
    }
  }

  bool is_one() const { return runs_.size() <= 1; }
  std::size_t merges() const { return runs_.size() / 2; }
  KeyRun run() const { return runs_.empty() ? KeyRun{} : runs_[0]; }
  const std::uint64_t* keys() const { return keys_[0].data(); }
  std::uint32_t base() const { return base_; }
  unsigned index_shift() const { return 32 + run_bits_; }

  struct Merge {
    const std::uint64_t* a;
    const std::uint64_t* b;
    std::uint64_t* out;
    std::size_t steps;
  };
  /// Of runs 2i and 2i + 1; all of them, then finish_level().
  Merge merge(std::size_t i) const {
    const KeyRun& a = runs_[2 * i];
    const KeyRun& b = runs_[2 * i + 1];
    return {keys_[0].data() + a.begin, keys_[0].data() + b.begin, keys_[1].data() + a.begin, a.vectors() + b.vectors()};
  }
  void finish_level() {
    std::vector<KeyRun> merged;
    for (std::size_t i = 0; i + 1 < runs_.size(); i += 2) {
      merged.push_back({runs_[i].begin, runs_[i].size + runs_[i + 1].size});
    }
    if (runs_.size() % 2 == 1) {
      const KeyRun& last = runs_.back();
      std::copy_n(keys_[0].data() + last.begin, last.space(), keys_[1].data() + last.begin);
      merged.push_back(last);
    }
    std::swap(keys_[0], keys_[1]);
    runs_ = std::move(merged);
  }

 private:
  template <class V>
  TELEGRAD_AVX512 void fill(Entries<V> part, std::uint32_t number, KeyRun run) {
    std::uint64_t* const keys = keys_[0].data() + run.begin;
    const __m512i base = _mm512_set1_epi64(static_cast<long long>(std::uint64_t{base_} << 32));
    const __m512i run_number = _mm512_set1_epi64(static_cast<long long>(std::uint64_t{number} << 32));
    const __m512i low = _mm512_set1_epi64(0xffffffffLL);
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(run_bits_));
    std::size_t i = 0;
    for (; i + kKeys <= part.size(); i += kKeys) {
      __builtin_prefetch(part.indices.data() + i + kEntriesAhead);
      __builtin_prefetch(part.values.data() + i + kEntriesAhead);
      const __m512i key = _mm512_sub_epi64(load_keys(part.indices.data() + i, part.values.data() + i), base);
      const __m512i high = _mm512_maskz_sll_epi64(0xff, _mm512_maskz_andnot_epi64(0xff, low, key), shift);
      _mm512_storeu_si512(keys + i, _mm512_or_si512(_mm512_or_si512(high, run_number), _mm512_and_si512(key, low)));
    }
    for (; i < part.size(); ++i) {
      typename std::make_unsigned_t<typename Format<V>::Bits> bits;
      std::memcpy(&bits, &part.values[i], sizeof bits);
      keys[i] = std::uint64_t{part.indices[i] - base_} << index_shift() | std::uint64_t{number} << 32 | bits;
    }
    std::fill(keys + i, keys + run.space(), kNoKey);
  }

  const unsigned run_bits_;
  std::uint32_t base_ = 0;
  std::vector<KeyRun> runs_;
  std::array<Array<std::uint64_t>, 2> keys_;
};

struct KeyMerge {
  RunKeys::Merge at;
  __m512i largest;

  TELEGRAD_AVX512 explicit KeyMerge(const RunKeys::Merge& merge) : at(merge), largest(_mm512_loadu_si512(merge.a)) {
    at.a += kKeys;
    at.steps -= 1;
  }
  TELEGRAD_AVX512 void step() {
    const bool from_a = *at.a <= *at.b;
    const __m512i next = _mm512_loadu_si512(from_a ? at.a : at.b);
    at.a += from_a ? kKeys : 0;
    at.b += from_a ? 0 : kKeys;
    const __m512i backwards = _mm512_setr_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i turned = _mm512_maskz_permutexvar_epi64(0xff, backwards, next);
    _mm512_storeu_si512(at.out, sort_bitonic(_mm512_maskz_min_epu64(0xff, largest, turned)));
    largest = sort_bitonic(_mm512_maskz_max_epu64(0xff, largest, turned));
    at.out += kKeys;
  }
  TELEGRAD_AVX512 void finish() {
    for (; at.steps > 0; --at.steps) step();
    _mm512_storeu_si512(at.out, largest);
    _mm512_storeu_si512(at.out + kKeys, _mm512_set1_epi64(-1));
  }
};

TELEGRAD_AVX512 inline void merge_beside(const RunKeys::Merge& first, const RunKeys::Merge& second) {
  KeyMerge one(first);
  KeyMerge other(second);
  const std::size_t both = std::min(one.at.steps, other.at.steps);
  for (std::size_t i = 0; i < both; ++i) {
    one.step();
    other.step();
  }
  one.at.steps -= both;
  other.at.steps -= both;
  one.finish();
  other.finish();
}

/// One run in each.
TELEGRAD_AVX512 inline void merge_all(std::span<RunKeys> chunks) {
  std::vector<RunKeys::Merge> merges;
  for (;;) {
    merges.clear();
    for (const RunKeys& chunk : chunks) {
      for (std::size_t i = 0; i < chunk.merges(); ++i) merges.push_back(chunk.merge(i));
    }
    if (merges.empty()) return;
    for (std::size_t i = 0; i + 1 < merges.size(); i += 2) merge_beside(merges[i], merges[i + 1]);
    if (merges.size() % 2 == 1) KeyMerge(merges.back()).finish();
    for (RunKeys& chunk : chunks) {
      if (!chunk.is_one()) chunk.finish_level();
    }
  }
}

/// Writes the entries of a chunk whose keys are merged, each index once. Returns how many.
template <class Combine, class V>
class KeyWriter {
 public:
  KeyWriter(const RunKeys& chunk, std::uint32_t* indices, V* values)
      : keys_(chunk.keys() + chunk.run().begin),
        size_(chunk.run().size),
        shift_(chunk.index_shift()),
        base_(chunk.base()),
        indices_(indices),
        values_(values) {}

  TELEGRAD_AVX512 std::size_t write() {
    for (std::size_t begin = 0; begin < size_; begin += kWrittenKeys) {
      const std::size_t keys = std::min(kWrittenKeys, size_ - begin);
      if (look_at(keys_ + begin, keys)) {
        write_batch(keys_ + begin, (keys + kKeys - 1) / kKeys);
      } else {
        write_one_by_one(keys_ + begin, keys);
      }
    }
    return count_;
  }

 private:
  std::uint32_t index_of(std::uint64_t key) const { return base_ + static_cast<std::uint32_t>(key >> shift_); }
  V value_of(std::uint64_t key) const {
    const auto bits = static_cast<std::make_unsigned_t<typename Format<V>::Bits>>(key);
    return std::bit_cast<V>(bits);
  }

  // Where each vector's entries go; false if more than two have one index.
  TELEGRAD_AVX512 bool look_at(const std::uint64_t* keys, std::size_t count) {
    const __m512i above = _mm512_set1_epi64(static_cast<long long>(~std::uint64_t{0} << shift_));
    std::size_t place = count_;
    unsigned carried = repeated_ ? 1 : 0;
    unsigned crowded = 0;
    for (std::size_t i = 0; i * kKeys < count; ++i) {
      const unsigned there = (1U << std::min(kKeys, count - i * kKeys)) - 1;
      const __m512i here = _mm512_loadu_si512(keys + i * kKeys);
      const __m512i next = _mm512_loadu_si512(keys + i * kKeys + 1);
      const unsigned same = _mm512_testn_epi64_mask(_mm512_xor_si512(here, next), above) & there;
      const unsigned second = same << 1 | carried;
      crowded |= same & second;
      same_[i] = static_cast<std::uint8_t>(same);
      kept_[i] = static_cast<std::uint8_t>(~second & there);
      places_[i] = place;
      place += static_cast<std::size_t>(__builtin_popcount(kept_[i]));
      carried = same >> (kKeys - 1);
    }
    if (crowded != 0) return false;
    count_ = place;
    // A key that nothing follows is the last of its index.
    repeated_ = carried != 0;
    return true;
  }

  TELEGRAD_AVX512 void write_batch(const std::uint64_t* keys, std::size_t vectors) {
    reduce_twins(keys, vectors);
    constexpr __mmask8 kAll = 0xff;
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(shift_));
    const __m256i base = _mm256_set1_epi32(static_cast<int>(base_));
    for (std::size_t i = 0; i < vectors; ++i) {
      const __m512i here = _mm512_loadu_si512(keys + i * kKeys);
      const __m256i offsets = _mm512_maskz_cvtepi64_epi32(kAll, _mm512_maskz_srl_epi64(kAll, here, shift));
      const __m256i indices = _mm256_maskz_compress_epi32(kept_[i], _mm256_add_epi32(offsets, base));
      const V* const from = results_.data() + i * kKeys;
      std::uint32_t* const to_indices = indices_ + places_[i];
      V* const to_values = values_ + places_[i];
      const auto kept = static_cast<std::size_t>(__builtin_popcount(kept_[i]));
      const bool is_last = places_[i] + kKeys > count_;  // nothing is written behind the last entry
      const auto there = static_cast<__mmask8>(is_last ? (1U << kept) - 1 : kAll);
      _mm256_mask_storeu_epi32(to_indices, there, indices);
      if constexpr (sizeof(V) == 4) {
        const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        _mm256_mask_storeu_epi32(to_values, there, _mm256_maskz_compress_epi32(kept_[i], values));
      } else {
        const __m256i values = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        const __m256i packed = _mm256_maskz_compress_epi32(kept_[i], values);
        _mm_mask_storeu_epi16(to_values, there, _mm256_maskz_cvtepi32_epi16(kAll, packed));
      }
    }
  }

  // results_[k] = the value of key k ∘ that of the next one, if that has its index.
  TELEGRAD_AVX512 void reduce_twins(const std::uint64_t* keys, std::size_t vectors) {
    constexpr __mmask8 kAll = 0xff;
    constexpr auto kNeutral = std::bit_cast<typename Format<V>::Bits>(Combine::template kNeutral<V>);
    for (std::size_t i = 0; i < vectors; ++i) {
      const __m512i here = _mm512_loadu_si512(keys + i * kKeys);
      const __m512i next = _mm512_loadu_si512(keys + i * kKeys + 1);
      const __m512i twin = _mm512_mask_mov_epi64(_mm512_set1_epi64(kNeutral), same_[i], next);
      V* const one = results_.data() + i * kKeys;
      V* const other = twins_.data() + i * kKeys;
      if constexpr (sizeof(V) == 4) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(one), _mm512_maskz_cvtepi64_epi32(kAll, here));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(other), _mm512_maskz_cvtepi64_epi32(kAll, twin));
      } else {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(one), _mm512_maskz_cvtepi64_epi16(kAll, here));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(other), _mm512_maskz_cvtepi64_epi16(kAll, twin));
      }
    }
    if constexpr (std::same_as<V, f16>) {
      for (std::size_t i = 0; i < vectors; ++i) {
        auto& one = *reinterpret_cast<std::array<V, kKeys>*>(results_.data() + i * kKeys);
        reduce_narrow<Combine>(one, *reinterpret_cast<const std::array<V, kKeys>*>(twins_.data() + i * kKeys));
      }
    } else {  // one long loop: the compiler makes vectors of it, but not of many short ones
      for (std::size_t k = 0; k < vectors * kKeys; ++k) results_[k] = Combine::of(results_[k], twins_[k]);
    }
  }

  void write_one_by_one(const std::uint64_t* keys, std::size_t count) {
    const bool others_follow = keys + count < keys_ + size_;
    const bool first_is_done = std::exchange(repeated_, false);
    for (std::size_t i = first_is_done ? 1 : 0; i < count + (others_follow ? 1 : 0); ++i) {
      const std::uint32_t index = index_of(keys[i]);
      const bool is_new = count_ == 0 || indices_[count_ - 1] != index;
      if (is_new && i == count) break;  // of the next batch
      if (is_new) {
        indices_[count_] = index;
        values_[count_++] = Combine::of(value_of(keys[i]), Combine::template kNeutral<V>);
      } else {
        values_[count_ - 1] = Combine::of(values_[count_ - 1], value_of(keys[i]));
      }
      repeated_ = i == count;
    }
  }

  const std::uint64_t* const keys_;
  const std::size_t size_;
  const unsigned shift_;
  const std::uint32_t base_;
  std::uint32_t* const indices_;
  V* const values_;
  std::size_t count_ = 0;
  bool repeated_ = false;  // the next batch's first key is part of the last entry already
  std::array<std::uint8_t, kWrittenKeys / kKeys> same_;
  std::array<std::uint8_t, kWrittenKeys / kKeys> kept_;
  std::array<std::size_t, kWrittenKeys / kKeys> places_;
  std::array<V, kWrittenKeys> results_;
  std::array<V, kWrittenKeys> twins_;
};

/// The first place whose index is not below `end`. Looked for around a guess: halving what may be far from the cache would miss
/// it at every step.
inline std::size_t find_near(std::span<const std::uint32_t> indices, std::uint32_t end, std::size_t guess) {
  std::size_t low = std::min(guess, indices.size());
  std::size_t high = low;  // the place is in [low, high], once below(low - 1) and not below(high)
  std::size_t step = 16;
  for (; low > 0 && indices[low - 1] >= end; step *= 2) {
    high = low - 1;
    low -= std::min(low, step);
  }
  for (; high < indices.size() && indices[high] < end; step *= 2) {
    low = high + 1;
    high = std::min(indices.size(), high + step);
  }
  const auto rest = indices.subspan(low, high - low);
  return low + static_cast<std::size_t>(std::ranges::lower_bound(rest, end) - rest.begin());
}

/// Cuts what is left of the inputs at an index, about kChunkEntries entries on.
template <class V>
void take_chunk(std::vector<Entries<V>>& rest, std::vector<Entries<V>>& chunk) {
  std::size_t total = 0;
  const Entries<V>* longest = &rest[0];
  for (const Entries<V>& entries : rest) {
    total += entries.size();
    if (entries.size() > longest->size()) longest = &entries;
  }
  chunk.assign(rest.begin(), rest.end());
  if (total <= kChunkEntries + kChunkEntries / 2 || longest->size() == 1) {
    rest.assign(rest.size(), {});
    return;
  }
  const std::size_t place = std::max<std::size_t>(1, longest->size() * kChunkEntries / total);
  const std::uint32_t end = longest->indices[place];
  const std::size_t longest_size = longest->size();
  for (std::size_t i = 0; i < rest.size(); ++i) {
    const std::size_t taken = find_near(rest[i].indices, end, rest[i].size() * place / longest_size);
    chunk[i] = rest[i].subrun(0, taken);
    rest[i] = rest[i].subrun(taken, rest[i].size() - taken);
  }
}

/// The bits of repeated merge(). out.capacity() holds all inputs' entries, and an index less the lowest one, with the
/// number of a run behind it, has at most 32 bits and is not all ones (not CHECKed).
template <class Combine, class V>
TELEGRAD_AVX512 std::size_t merge_runs(std::span<const Entries<V>> inputs, EntriesOut<V> out) {
  static_assert(sizeof(V) <= 4);
  const auto run_bits = static_cast<unsigned>(std::bit_width(inputs.size() - 1));
  std::vector<Entries<V>> rest(inputs.begin(), inputs.end());
  std::vector<Entries<V>> parts;
  std::array<RunKeys, 2> chunks{RunKeys(run_bits), RunKeys(run_bits)};
  std::size_t count = 0;
  while (std::ranges::any_of(rest, [](const Entries<V>& entries) { return !entries.empty(); })) {
    for (RunKeys& chunk : chunks) {
      take_chunk(rest, parts);
      chunk.template take<V>(parts);
    }
    merge_all(chunks);
    for (const RunKeys& chunk : chunks) {
      KeyWriter<Combine, V> writer(chunk, out.indices.data() + count, out.values.data() + count);
      count += writer.write();
    }
  }
  return count;
}

}  // namespace telegrad::kernels

#endif
