#include "kernels/members.hpp"

#include <algorithm>
#include <array>
#include <bit>

#include "base/check.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/intrinsics.hpp"
#include "kernels/marks.hpp"

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

std::size_t mark_portable(const std::uint32_t* indices, std::size_t words, Indices members, std::uint64_t* marks) {
  std::size_t next = 0;
  for (std::size_t word = 0; word < words; ++word) {
    marks[word] = mark_word({indices + word * kWord, kWord}, members, next);
  }
  return next;
}

#ifdef TELEGRAD_KERNELS_X86

constexpr std::size_t kGroup = 16;
constexpr std::size_t kAtOnce = 8;  // members that are looked for in a group: looking once more is a branch that nobody foresees

// Of 16 indices; members[next] and those behind it can be read.
TELEGRAD_AVX512 inline std::uint32_t mark_group(const std::uint32_t* indices, const std::uint32_t* members) {
  const __m512i group = _mm512_loadu_si512(indices);
  std::uint32_t marks = 0;
  for (std::size_t i = 0; i < kAtOnce; ++i) {
    marks |= _mm512_cmpeq_epi32_mask(group, _mm512_set1_epi32(static_cast<int>(members[i])));
  }
  return marks;
}

// As long as members can be read ahead.
TELEGRAD_AVX512 inline bool mark_word_avx512(const std::uint32_t* indices, Indices members, std::size_t& next,
                                             std::uint64_t& word) {
  word = 0;
  if (next + kWord + kAtOnce > members.size()) return false;
  for (std::size_t first = 0; first < kWord; first += kGroup) {
    std::uint32_t all = 0;
    for (std::size_t found = kAtOnce, looks = 0; found == kAtOnce && looks < kGroup / kAtOnce; ++looks) {
      const std::uint32_t some = mark_group(indices + first, members.data() + next);
      found = static_cast<std::size_t>(std::popcount(some));
      next += found;
      all |= some;
    }
    word |= std::uint64_t{all} << first;
  }
  return true;
}

// Each word waits for where the one before it has come to, so several parts are under way at once.
TELEGRAD_AVX512 std::size_t mark_avx512(const std::uint32_t* indices, std::size_t words, Indices members,
                                        std::uint64_t* marks) {
  constexpr std::size_t kParts = 4;
  const std::size_t each = words / kParts;
  std::array<std::size_t, kParts> next{};
  for (std::size_t part = 1; each > 0 && part < kParts; ++part) {
    const auto at = std::ranges::lower_bound(members, indices[part * each * kWord]);
    next[part] = static_cast<std::size_t>(at - members.begin());
  }
  const auto mark_one = [&](std::size_t at, std::size_t part) {
    if (mark_word_avx512(indices + at * kWord, members, next[part], marks[at])) return;
    marks[at] = mark_word({indices + at * kWord, kWord}, members, next[part]);
  };
  for (std::size_t i = 0; i < each; ++i) {
    for (std::size_t part = 0; part < kParts; ++part) mark_one(part * each + i, part);
  }
  for (std::size_t at = kParts * each; at < words; ++at) mark_one(at, kParts - 1);
  return next.back();
}

constexpr Variants<MarkFunction> kMark{mark_portable, nullptr, mark_avx512};

#else

constexpr Variants<MarkFunction> kMark{mark_portable};

#endif

}  // namespace

std::size_t mark_members(Indices indices, Indices members, std::span<std::uint64_t> marks) {
  TELEGRAD_CHECK(marks.size() == mark_words(indices.size()));
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
