#include "codec/left_out.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/check.hpp"
#include "base/types.hpp"
#include "codec/bit_words.hpp"
#include "codec/members.hpp"
#include "kernels/arithmetic.hpp"
#include "kernels/elementwise.hpp"
#include "kernels/intrinsics.hpp"
#include "kernels/marks.hpp"
#include "kernels/pack_avx2.hpp"

namespace telegrad::kernels {
namespace {

constexpr std::size_t kWord = 64;
constexpr std::size_t kChunk = 1024 * kWord;  // entries of the sum whose marks are made in one go: they stay in the cache

template <class V>
bool same_bits(const V& a, const V& b) {
  return std::memcmp(&a, &b, sizeof(V)) == 0;
}

bool is_marked(std::span<const std::uint64_t> marks, std::size_t i) { return (marks[i / kWord] >> i % kWord & 1U) != 0; }

// `count` marks from `first` on, at most 64.
TELEGRAD_INTO_CALLER std::uint64_t take_marks(const std::uint64_t* marks, std::size_t first, std::size_t count) {
  if (count == 0) return 0;
  const std::size_t within = first % kWord;
  std::uint64_t taken = marks[first / kWord] >> within;
  if (within + count > kWord) taken |= marks[first / kWord + 1] << (kWord - within);
  return count == kWord ? taken : taken & low_bits(count);
}

// The reverse, where there are none yet.
TELEGRAD_INTO_CALLER void put_marks(std::uint64_t* marks, std::size_t first, std::size_t count, std::uint64_t put) {
  if (count == 0) return;
  const std::size_t within = first % kWord;
  marks[first / kWord] |= put << within;
  if (within + count > kWord) marks[first / kWord + 1] |= put >> (kWord - within);
}

// Where a pass over a sum has come to: given entries, and values that are left.
struct Progress {
  std::size_t given = 0;
  std::size_t rest = 0;
};

// Of words of the sum's entries: which are given, by `theirs`. A variant does as many words as it can, and says how many.
template <class V>
using LeaveFunction = std::size_t(const V* sum, std::span<const std::uint64_t> theirs, std::span<const V> given,
                                  std::uint64_t* known, V* rest, Progress* at);
template <class V>
using PutFunction = std::size_t(V* values, std::span<const std::uint64_t> theirs, std::span<const V> given,
                                const std::uint64_t* known, std::span<const V> rest, Progress* at);

template <class V>
std::size_t leave_portable(const V*, std::span<const std::uint64_t>, std::span<const V>, std::uint64_t*, V*, Progress*) {
  return 0;
}
template <class V>
using LeaveOfFunction = std::size_t(const V* sum, std::span<const std::uint8_t> givers, std::uint8_t giver, std::uint64_t* known,
                                    V* rest, Progress* at);
template <class V>
std::size_t leave_of_portable(const V*, std::span<const std::uint8_t>, std::uint8_t, std::uint64_t*, V*, Progress*) {
  return 0;
}
template <class V>
std::size_t put_portable(V*, std::span<const std::uint64_t>, std::span<const V>, const std::uint64_t*,
                         std::span<const V>, Progress*) {
  return 0;
}

#ifdef TELEGRAD_KERNELS_X86

constexpr std::size_t kEight = 8;

// Values of 32 bits, whole words.
template <class V>
TELEGRAD_AVX2 std::size_t leave_avx2(const V* sum, std::span<const std::uint64_t> theirs, std::span<const V> given,
                                     std::uint64_t* known, V* rest, Progress* progress) {
  Progress at = *progress;
  for (std::size_t word = 0; word < theirs.size(); ++word) {
    const std::uint64_t mine = theirs[word];
    std::uint64_t same = 0;
    std::size_t next = at.given;
    for (std::size_t first = 0; first < kWord; first += kEight) {
      const auto lanes = static_cast<std::uint32_t>(mine >> first) & 0xffU;
      const auto count = static_cast<std::size_t>(std::popcount(lanes));
      const __m256i values = load8(sum + word * kWord + first);
      const __m256i theirs_there = expand8(load_first8(given.data() + next, count), lanes);
      const std::uint32_t equal = mask_of_lanes(_mm256_cmpeq_epi32(values, theirs_there)) & lanes;
      const std::uint32_t kept = ~equal & 0xffU;
      store8(rest + at.rest, pack8(values, kept));
      at.rest += static_cast<std::size_t>(std::popcount(kept));
      next += count;
      same |= std::uint64_t{equal} << first;
    }
    put_marks(known, at.given, next - at.given, _pext_u64(same, mine));
    at.given = next;
  }
  *progress = at;
  return theirs.size();
}

template <class V>
TELEGRAD_AVX2 std::size_t leave_of_avx2(const V* sum, std::span<const std::uint8_t> givers, std::uint8_t giver,
                                        std::uint64_t* known, V* rest, Progress* progress) {
  Progress at = *progress;
  const __m256i wanted = _mm256_set1_epi8(static_cast<char>(giver));
  const std::size_t words = givers.size() / kWord;
  for (std::size_t word = 0; word < words; ++word) {
    const __m256i lower = load8(givers.data() + word * kWord);
    const __m256i upper = load8(givers.data() + word * kWord + kWord / 2);
    const std::uint64_t mine = mask_of_bytes(_mm256_cmpeq_epi8(_mm256_and_si256(lower, wanted), wanted),
                                             _mm256_cmpeq_epi8(_mm256_and_si256(upper, wanted), wanted));
    const std::uint64_t alone = mask_of_bytes(_mm256_cmpeq_epi8(lower, wanted), _mm256_cmpeq_epi8(upper, wanted));
    std::uint64_t same = 0;
    for (std::size_t first = 0; first < kWord; first += kEight) {
      const __m256i values = load8(sum + word * kWord + first);
      const __m256 floats = _mm256_castsi256_ps(values);
      const auto sound = static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(floats, floats, _CMP_ORD_Q)));
      const std::uint32_t left_out = static_cast<std::uint32_t>(alone >> first) & sound;
      const std::uint32_t kept = ~left_out & 0xffU;
      store8(rest + at.rest, pack8(values, kept));
      at.rest += static_cast<std::size_t>(std::popcount(kept));
      same |= std::uint64_t{left_out} << first;
    }
    const auto count = static_cast<std::size_t>(std::popcount(mine));
    put_marks(known, at.given, count, _pext_u64(same, mine));
    at.given += count;
  }
  *progress = at;
  return words * kWord;
}

template <class V>
TELEGRAD_AVX2 std::size_t put_avx2(V* values, std::span<const std::uint64_t> theirs, std::span<const V> given,
                                   const std::uint64_t* known, std::span<const V> rest, Progress* progress) {
  Progress at = *progress;
  std::size_t word = 0;
  for (; word < theirs.size(); ++word) {
    const std::uint64_t mine = theirs[word];
    const auto count = static_cast<std::size_t>(std::popcount(mine));
    const std::uint64_t back = _pdep_u64(take_marks(known, at.given, count), mine);
    const std::size_t others = kWord - static_cast<std::size_t>(std::popcount(back));
    if (others > rest.size() - at.rest) break;  // not all given indices are here: marks stand for others
    for (std::size_t first = 0; first < kWord; first += kEight) {
      const auto lanes = static_cast<std::uint32_t>(mine >> first) & 0xffU;
      const auto put = static_cast<std::uint32_t>(back >> first) & 0xffU;
      const auto here = static_cast<std::size_t>(std::popcount(lanes));
      const std::size_t left = kEight - static_cast<std::size_t>(std::popcount(put));
      const __m256i own = expand8(load_first8(given.data() + at.given, here), lanes);
      const __m256i other = expand8(load_first8(rest.data() + at.rest, left), ~put & 0xffU);
      store8(values + word * kWord + first, _mm256_blendv_epi8(other, own, lanes_of(put)));
      at.given += here;
      at.rest += left;
    }
  }
  *progress = at;
  return word;
}

constexpr std::size_t kGroup = 16;

TELEGRAD_AVX512 inline __m512i load_first(const void* values, std::size_t count) {
  return _mm512_maskz_loadu_epi32(static_cast<__mmask16>(_bzhi_u32(0xffff, static_cast<unsigned>(count))), values);
}

// Values of 32 bits, whole words.
template <class V>
TELEGRAD_AVX512 std::size_t leave_avx512(const V* sum, std::span<const std::uint64_t> theirs, std::span<const V> given,
                                         std::uint64_t* known, V* rest, Progress* at) {
  for (std::size_t word = 0; word < theirs.size(); ++word) {
    const std::uint64_t mine = theirs[word];
    std::uint64_t same = 0;
    std::size_t next = at->given;
    for (std::size_t first = 0; first < kWord; first += kGroup) {
      const auto lanes = static_cast<__mmask16>(mine >> first);
      const auto count = static_cast<std::size_t>(std::popcount(lanes));
      const __m512i values = _mm512_loadu_si512(sum + word * kWord + first);
      const __m512i theirs_there = _mm512_maskz_expand_epi32(lanes, load_first(given.data() + next, count));
      const __mmask16 equal = _mm512_mask_cmpeq_epi32_mask(lanes, values, theirs_there);
      const auto kept = static_cast<__mmask16>(~equal);
      _mm512_storeu_si512(rest + at->rest, _mm512_maskz_compress_epi32(kept, values));
      at->rest += static_cast<std::size_t>(std::popcount(kept));
      next += count;
      same |= std::uint64_t{equal} << first;
    }
    put_marks(known, at->given, next - at->given, _pext_u64(same, mine));
    at->given = next;
  }
  return theirs.size();
}

template <class V>
TELEGRAD_AVX512 std::size_t leave_of_avx512(const V* sum, std::span<const std::uint8_t> givers, std::uint8_t giver,
                                            std::uint64_t* known, V* rest, Progress* progress) {
  Progress at = *progress;
  const __m512i wanted = _mm512_set1_epi8(static_cast<char>(giver));
  const std::size_t words = givers.size() / kWord;
  for (std::size_t word = 0; word < words; ++word) {
    const __m512i gave = _mm512_loadu_si512(givers.data() + word * kWord);
    const std::uint64_t mine = _mm512_test_epi8_mask(gave, wanted);
    const std::uint64_t alone = _mm512_cmpeq_epi8_mask(gave, wanted);
    std::uint64_t same = 0;
    for (std::size_t first = 0; first < kWord; first += kGroup) {
      const __m512i values = _mm512_loadu_si512(sum + word * kWord + first);
      const __m512 floats = _mm512_castsi512_ps(values);
      const auto left_out = _mm512_mask_cmp_ps_mask(static_cast<__mmask16>(alone >> first), floats, floats, _CMP_ORD_Q);
      const auto kept = static_cast<__mmask16>(~left_out);
      _mm512_storeu_si512(rest + at.rest, _mm512_maskz_compress_epi32(kept, values));
      at.rest += static_cast<std::size_t>(std::popcount(kept));
      same |= std::uint64_t{left_out} << first;
    }
    const auto count = static_cast<std::size_t>(std::popcount(mine));
    put_marks(known, at.given, count, _pext_u64(same, mine));
    at.given += count;
  }
  *progress = at;
  return words * kWord;
}

template <class V>
TELEGRAD_AVX512 std::size_t put_avx512(V* values, std::span<const std::uint64_t> theirs, std::span<const V> given,
                                       const std::uint64_t* known, std::span<const V> rest, Progress* at) {
  for (std::size_t word = 0; word < theirs.size(); ++word) {
    const std::uint64_t mine = theirs[word];
    const auto count = static_cast<std::size_t>(std::popcount(mine));
    const std::uint64_t back = _pdep_u64(take_marks(known, at->given, count), mine);
    const std::size_t others = kWord - static_cast<std::size_t>(std::popcount(back));
    if (others > rest.size() - at->rest) return word;  // not all given indices are here: marks stand for others
    for (std::size_t first = 0; first < kWord; first += kGroup) {
      const auto lanes = static_cast<__mmask16>(mine >> first);
      const auto put = static_cast<__mmask16>(back >> first);
      const auto here = static_cast<std::size_t>(std::popcount(lanes));
      const std::size_t left = kGroup - static_cast<std::size_t>(std::popcount(put));
      const __m512i own = _mm512_maskz_expand_epi32(lanes, load_first(given.data() + at->given, here));
      const __m512i all = _mm512_mask_expand_epi32(own, static_cast<__mmask16>(~put), load_first(rest.data() + at->rest, left));
      _mm512_storeu_si512(values + word * kWord + first, all);
      at->given += here;
      at->rest += left;
    }
  }
  return theirs.size();
}

template <class V>
constexpr Variants<LeaveFunction<V>> kLeave{leave_portable<V>, sizeof(V) == 4 ? leave_avx2<V> : nullptr, sizeof(V) == 4 ? leave_avx512<V> : nullptr};
template <class V>
constexpr Variants<LeaveOfFunction<V>> kLeaveOf{leave_of_portable<V>, std::is_same_v<V, float> ? leave_of_avx2<V> : nullptr,
                                                std::is_same_v<V, float> ? leave_of_avx512<V> : nullptr};
template <class V>
constexpr Variants<PutFunction<V>> kPut{put_portable<V>, sizeof(V) == 4 ? put_avx2<V> : nullptr, sizeof(V) == 4 ? put_avx512<V> : nullptr};

#else

template <class V>
constexpr Variants<LeaveFunction<V>> kLeave{leave_portable<V>};
template <class V>
constexpr Variants<LeaveOfFunction<V>> kLeaveOf{leave_of_portable<V>};
template <class V>
constexpr Variants<PutFunction<V>> kPut{put_portable<V>};

#endif

// Calls visit(first entry of the chunk, its entries' marks) for each chunk of `indices`, as long as it returns true; says
// whether all of `members` are among them, and it always did.
template <class Visit>
bool visit_members(std::span<const std::uint32_t> indices, std::span<const std::uint32_t> members, Visit visit) {
  std::array<std::uint64_t, kChunk / kWord> marks;
  std::size_t found = 0;
  for (std::size_t first = 0; first < indices.size(); first += kChunk) {
    const auto chunk = indices.subspan(first, std::min(kChunk, indices.size() - first));
    const auto theirs = std::span(marks).first(mark_words(chunk.size()));
    found += mark_members(chunk, members.subspan(found), theirs);
    if (found > members.size() || !visit(first, std::span<const std::uint64_t>(theirs))) return false;
  }
  return found == members.size();
}

}  // namespace

template <class V>
std::size_t leave_out(Entries<V> sum, Entries<V> given, std::span<std::uint64_t> known, std::span<V> rest) {
  TELEGRAD_CHECK(known.size() == mark_words(given.size()) && rest.size() == sum.size());
  std::ranges::fill(known, 0U);
  Progress at;
  const bool all = visit_members(sum.indices, given.indices, [&](std::size_t first, std::span<const std::uint64_t> theirs) {
    const std::size_t whole = std::min(theirs.size(), (sum.size() - first) / kWord);
    const std::size_t done = kLeave<V>(sum.values.data() + first, theirs.first(whole), given.values, known.data(),
                                       rest.data(), &at);
    const std::size_t end = std::min(sum.size(), first + theirs.size() * kWord);
    for (std::size_t i = first + done * kWord; i < end; ++i) {
      const bool theirs_too = is_marked(theirs, i - first);
      const bool same = theirs_too && same_bits(sum.values[i], given.values[at.given]);
      if (same) known[at.given / kWord] |= std::uint64_t{1} << at.given % kWord;
      if (!same) rest[at.rest++] = sum.values[i];
      at.given += theirs_too ? 1 : 0;
    }
    return true;
  });
  TELEGRAD_CHECK(all);
  return at.rest;
}

template <class V>
std::size_t leave_out_of(std::span<const V> sum, std::span<const std::uint8_t> givers, std::size_t giver, std::size_t entries,
                         std::span<std::uint64_t> known, std::span<V> rest) {
  TELEGRAD_CHECK(known.size() == mark_words(entries) && rest.size() == sum.size() && givers.size() == sum.size());
  const auto bit = static_cast<std::uint8_t>(1U << giver);
  std::ranges::fill(known, 0U);
  Progress at;
  for (std::size_t i = kLeaveOf<V>(sum.data(), givers, bit, known.data(), rest.data(), &at); i < sum.size(); ++i) {
    const bool same = givers[i] == bit && !is_nan(sum[i]);
    if (same) known[at.given / kWord] |= std::uint64_t{1} << at.given % kWord;
    if (!same) rest[at.rest++] = sum[i];
    at.given += (givers[i] & bit) != 0 ? 1 : 0;
  }
  TELEGRAD_CHECK(at.given == entries);
  return at.rest;
}

std::size_t count_known(std::span<const std::uint64_t> known, std::size_t entries) {
  TELEGRAD_CHECK(known.size() == mark_words(entries));
  if (entries % kWord != 0 && known.back() >> entries % kWord != 0) return std::numeric_limits<std::size_t>::max();
  return count_marks(known);
}

template <class V>
bool put_back(std::span<const std::uint32_t> indices, Entries<V> given, std::span<const std::uint64_t> known,
              std::span<const V> rest, std::span<V> values) {
  TELEGRAD_CHECK(values.size() == indices.size());
  TELEGRAD_CHECK(count_known(known, given.size()) + rest.size() == indices.size());
  Progress at;
  return visit_members(indices, given.indices, [&](std::size_t first, std::span<const std::uint64_t> theirs) {
    const std::size_t whole = std::min(theirs.size(), (values.size() - first) / kWord);
    const std::size_t done =
        kPut<V>(values.data() + first, theirs.first(whole), given.values, known.data(), rest, &at);
    const std::size_t end = std::min(values.size(), first + theirs.size() * kWord);
    for (std::size_t i = first + done * kWord; i < end; ++i) {
      const bool mine = is_marked(theirs, i - first);
      const bool back = mine && is_marked(known, at.given);
      if (!back && at.rest == rest.size()) return false;  // not all given indices are here: marks stand for others
      values[i] = back ? given.values[at.given] : rest[at.rest++];
      at.given += mine ? 1 : 0;
    }
    return true;
  });
}

namespace reference {

template <class V>
std::size_t leave_out(Entries<V> sum, Entries<V> given, std::span<std::uint64_t> known, std::span<V> rest) {
  std::ranges::fill(known, 0U);
  std::size_t copied = 0;
  std::size_t next = 0;
  for (std::size_t at = 0; at < sum.size(); ++at) {
    while (next < given.size() && given.indices[next] < sum.indices[at]) ++next;
    if (next < given.size() && given.indices[next] == sum.indices[at] && same_bits(given.values[next], sum.values[at])) {
      known[next / kWord] |= std::uint64_t{1} << next % kWord;
    } else {
      rest[copied++] = sum.values[at];
    }
  }
  return copied;
}

template <class V>
std::size_t leave_out_of(std::span<const V> sum, std::span<const std::uint8_t> givers, std::size_t giver,
                         std::span<std::uint64_t> known, std::span<V> rest) {
  std::ranges::fill(known, 0U);
  std::size_t copied = 0;
  std::size_t next = 0;
  for (std::size_t at = 0; at < sum.size(); ++at) {
    if (givers[at] == 1U << giver && !is_nan(sum[at])) {
      known[next / kWord] |= std::uint64_t{1} << next % kWord;
    } else {
      rest[copied++] = sum[at];
    }
    next += givers[at] >> giver & 1U;
  }
  return copied;
}

template <class V>
bool put_back(std::span<const std::uint32_t> indices, Entries<V> given, std::span<const std::uint64_t> known,
              std::span<const V> rest, std::span<V> values) {
  std::size_t next = 0;
  std::size_t taken = 0;
  for (std::size_t at = 0; at < indices.size(); ++at) {
    const bool mine = next < given.size() && given.indices[next] == indices[at];
    values[at] = mine && is_marked(known, next) ? given.values[next] : rest[taken++];
    if (mine) ++next;
  }
  return next == given.size();
}

}  // namespace reference

#define TELEGRAD_INSTANTIATE(V)                                                                                  \
  template std::size_t leave_out(Entries<V>, Entries<V>, std::span<std::uint64_t>, std::span<V>);                \
  template std::size_t leave_out_of(std::span<const V>, std::span<const std::uint8_t>, std::size_t, std::size_t, \
                                    std::span<std::uint64_t>, std::span<V>);                                     \
  template std::size_t reference::leave_out_of(std::span<const V>, std::span<const std::uint8_t>, std::size_t,   \
                                               std::span<std::uint64_t>, std::span<V>);                          \
  template bool put_back(std::span<const std::uint32_t>, Entries<V>, std::span<const std::uint64_t>,             \
                         std::span<const V>, std::span<V>);                                                     \
  template std::size_t reference::leave_out(Entries<V>, Entries<V>, std::span<std::uint64_t>, std::span<V>);     \
  template bool reference::put_back(std::span<const std::uint32_t>, Entries<V>, std::span<const std::uint64_t>, \
                                    std::span<const V>, std::span<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad::kernels
