// The pool: memory of every length is the caller's alone, aligned, and comes back.
#include "testing.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/random.hpp"

namespace {

using namespace telegrad;

void fill(const Buffer& buffer, std::size_t mark) {
  std::memset(buffer.data(), static_cast<int>(mark % 251 + 1), buffer.size());
}

bool holds(const Buffer& buffer, std::size_t mark) {
  return std::ranges::all_of(buffer.bytes(), [mark](std::byte b) { return b == std::byte(mark % 251 + 1); });
}

}  // namespace

TEST("buffers of all lengths are apart and aligned, more of them than any slab or arena holds") {
  std::vector<Buffer> buffers;
  for (const std::size_t size : {1U, 63U, 64U, 1000U, 1024U, 1025U, 9000U, 16384U, 70000U, 262144U, 1048576U, 3000000U}) {
    for (std::size_t bytes = 0; bytes < (size < 2000 ? 300'000U : 9'000'000U); bytes += size) {
      buffers.emplace_back(size);
      fill(buffers.back(), buffers.size());
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffers.back().data()) % 64, 0U);
    }
  }
  const std::size_t before = buffers.size();
  while (buffers.size() < before + 90) {
    buffers.emplace_back(std::size_t{1} << 20);
    fill(buffers.back(), buffers.size());
  }
  bool all = true;
  for (std::size_t i = 0; i < buffers.size(); ++i) all &= holds(buffers[i], i + 1);
  EXPECT(all);
}

TEST("buffers that come and go in any order keep what is theirs") {
  Random random(1);
  std::vector<std::pair<Buffer, std::size_t>> held;
  bool all = true;
  for (std::size_t turn = 0; turn < 3000; ++turn) {
    if (held.size() > 40 || (!held.empty() && random.below(3) == 0)) {
      std::swap(held[random.below(held.size())], held.back());
      all &= holds(held.back().first, held.back().second);
      held.pop_back();
    } else {
      held.emplace_back(Buffer(1 + random.below(std::uint64_t{1} << random.below(22))), turn);
      fill(held.back().first, turn);
    }
  }
  EXPECT(all);
}
