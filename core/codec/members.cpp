#include "codec/members.hpp"

#include <algorithm>
#include <array>
#include <bit>

#include "base/check.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/intrinsics.hpp"
#include "kernels/marks.hpp"
#include "kernels/pack_avx2.hpp"

namespace telegrad::kernels {
namespace {

constexpr std::size_t kWord = 64;

using Indices = std::span<const std::uint32_t>;

// Marks whole words, of so many members from the first on; says how many members it has come past.
using MarkFunction = std::size_t(const std::uint32_t* indices, std::size_t words, Indices members, std::uint64_t* marks);

// Of up to 64 indices.
std::uint64_t mark_word(Indices indices, Indices members, std::size_t& next) {
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < indices.size() && next < members.size(); ++i) {
    const bool is = indices[i] == members[next];
    word |= std::uint64_t{is} << i;
    next += is ? 1 : 0;
  }
  return word;
}

// Where a word of indices, and the members from which on it has some, lie in each of the parts that are under way at once: each
// word waits for where the one before it has come to.
constexpr std::size_t kParts = 4;
using PartWords = std::array<const std::uint32_t*, kParts>;
using PartMembers = std::array<std::size_t, kParts>;
using PartMarks = std::array<std::uint64_t, kParts>;

// `mark_parts` marks a word of each part.
template <class MarkParts>
std::size_t mark_in_parts(const std::uint32_t* indices, std::size_t words, Indices members, std::uint64_t* marks,
                          const MarkParts& mark_parts) {
  const std::size_t each = words / kParts;
  PartMembers next{};
  for (std::size_t part = 1; each > 0 && part < kParts; ++part) {
    const auto at = std::ranges::lower_bound(members, indices[part * each * kWord]);
    next[part] = static_cast<std::size_t>(at - members.begin());
  }
  for (std::size_t i = 0; i < each; ++i) {
    PartWords at;
    for (std::size_t part = 0; part < kParts; ++part) at[part] = indices + (part * each + i) * kWord;
    const PartMarks marked = mark_parts(at, next);
    for (std::size_t part = 0; part < kParts; ++part) marks[part * each + i] = marked[part];
  }
  for (std::size_t at = kParts * each; at < words; ++at) marks[at] = mark_word({indices + at * kWord, kWord}, members, next.back());
  return next.back();
}

std::size_t mark_portable(const std::uint32_t* indices, std::size_t words, Indices members, std::uint64_t* marks) {
  return mark_in_parts(indices, words, members, marks, [&](const PartWords& parts, PartMembers& next) {
    PartMarks marked;
    for (std::size_t part = 0; part < kParts; ++part) marked[part] = mark_word({parts[part], kWord}, members, next[part]);
    return marked;
  });
}

#ifdef TELEGRAD_KERNELS_X86

// Members that are looked for in a group: looking once more is a branch that nobody foresees.
constexpr std::size_t kAtOnce = 8;

// So many members can be read from where a word's begin: all that it may have, and those that are looked for beside its last one.
constexpr std::size_t kReadMost = kWord + kAtOnce;

// The members from `next` on, where so many can be read: if there are not, in `room`, and then the last one again and again, which no
// later index equals. There is at least one member.
const std::uint32_t* readable(Indices members, std::size_t next, std::array<std::uint32_t, kReadMost>& room) {
  if (next + kReadMost <= members.size()) return members.data() + next;
  const auto copied = std::ranges::copy(members.subspan(next), room.begin());
  std::fill(copied.out, room.end(), members.back());
  return room.data();
}

// Calls mark_parts(a word of each part, its members, how many are found), which marks them.
template <class MarkParts>
std::size_t mark_looking_ahead(const std::uint32_t* indices, std::size_t words, Indices members, std::uint64_t* marks,
                               const MarkParts& mark_parts) {
  return mark_in_parts(indices, words, members, marks, [&](const PartWords& parts, PartMembers& next) {
    std::array<std::array<std::uint32_t, kReadMost>, kParts> room;
    PartWords looked_for;
    for (std::size_t part = 0; part < kParts; ++part) looked_for[part] = readable(members, next[part], room[part]);
    PartMembers found{};
    const PartMarks marked = mark_parts(parts, looked_for, found);
    for (std::size_t part = 0; part < kParts; ++part) next[part] = std::min(next[part] + found[part], members.size());
    return marked;
  });
}

// Eight indices of each part in turn.
TELEGRAD_AVX2 PartMarks mark_parts_avx2(const PartWords& words, const PartWords& members, PartMembers& found) {
  constexpr std::size_t kEight = 8;
  PartMarks marks{};
  for (std::size_t first = 0; first < kWord; first += kEight) {
    for (std::size_t part = 0; part < kParts; ++part) {
      const __m256i group = load8(words[part] + first);
      const std::uint32_t* const looked_for = members[part] + found[part];
      __m256i equal = _mm256_setzero_si256();
      for (std::size_t i = 0; i < kAtOnce; ++i) {
        const __m256i member = _mm256_set1_epi32(static_cast<int>(looked_for[i]));
        equal = _mm256_or_si256(equal, _mm256_cmpeq_epi32(group, member));
      }
      const std::uint32_t some = mask_of_lanes(equal);
      found[part] += static_cast<std::size_t>(std::popcount(some));
      marks[part] |= std::uint64_t{some} << first;
    }
  }
  return marks;
}

std::size_t mark_avx2(const std::uint32_t* indices, std::size_t words, Indices members, std::uint64_t* marks) {
  return mark_looking_ahead(indices, words, members, marks, mark_parts_avx2);
}

constexpr std::size_t kGroup = 16;

// Of 16 indices; members[next] and those behind it can be read.
TELEGRAD_AVX512 inline std::uint32_t mark_group(const std::uint32_t* indices, const std::uint32_t* members) {
  const __m512i group = _mm512_loadu_si512(indices);
  std::uint32_t marks = 0;
  for (std::size_t i = 0; i < kAtOnce; ++i) {
    marks |= _mm512_cmpeq_epi32_mask(group, _mm512_set1_epi32(static_cast<int>(members[i])));
  }
  return marks;
}

TELEGRAD_AVX512 inline std::uint64_t mark_word_avx512(const std::uint32_t* indices, const std::uint32_t* members,
                                                      std::size_t& next) {
  std::uint64_t word = 0;
  for (std::size_t first = 0; first < kWord; first += kGroup) {
    std::uint32_t all = 0;
    for (std::size_t found = kAtOnce, looks = 0; found == kAtOnce && looks < kGroup / kAtOnce; ++looks) {
      const std::uint32_t some = mark_group(indices + first, members + next);
      found = static_cast<std::size_t>(std::popcount(some));
      next += found;
      all |= some;
    }
    word |= std::uint64_t{all} << first;
  }
  return word;
}

PartMarks mark_parts_avx512(const PartWords& words, const PartWords& members, PartMembers& found) {
  PartMarks marks;
  for (std::size_t part = 0; part < kParts; ++part) marks[part] = mark_word_avx512(words[part], members[part], found[part]);
  return marks;
}

std::size_t mark_avx512(const std::uint32_t* indices, std::size_t words, Indices members, std::uint64_t* marks) {
  return mark_looking_ahead(indices, words, members, marks, mark_parts_avx512);
}

constexpr Variants<MarkFunction> kMark{mark_portable, mark_avx2, mark_avx512};

#else

constexpr Variants<MarkFunction> kMark{mark_portable};

#endif

}  // namespace

std::size_t mark_members(Indices indices, Indices members, std::span<std::uint64_t> marks) {
  TELEGRAD_CHECK(marks.size() == mark_words(indices.size()));
  if (members.empty()) {
    std::ranges::fill(marks, 0U);
    return 0;
  }
  const std::size_t words = indices.size() / kWord;
  std::size_t next = kMark(indices.data(), words, members, marks.data());
  if (words < marks.size()) marks[words] = mark_word(indices.subspan(words * kWord), members, next);
  return count_marks(marks);
}

namespace reference {

std::size_t mark_members(Indices indices, Indices members, std::span<std::uint64_t> marks) {
  std::ranges::fill(marks, 0U);
  std::size_t count = 0;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (!std::ranges::binary_search(members, indices[i])) continue;
    marks[i / kWord] |= std::uint64_t{1} << i % kWord;
    ++count;
  }
  return count;
}

}  // namespace reference

}  // namespace telegrad::kernels
