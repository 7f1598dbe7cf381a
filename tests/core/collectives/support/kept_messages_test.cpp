// Messages kept by source, small and large, across blocks; those that did not come.
#include "testing.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "collectives/support/kept_messages.hpp"

namespace {

using namespace telegrad;

Buffer message_of(Rank source, std::size_t size) {
  Buffer message(size);
  for (std::byte& byte : message.bytes()) byte = static_cast<std::byte>(source);
  return message;
}

TEST("messages of all sizes are found by source, where add() said, also after a move") {
  constexpr Rank kRanks = 500;
  Random random(1);
  KeptMessages kept;
  std::vector<ConstBytes> places(kRanks);
  std::vector<std::size_t> sizes(kRanks);
  for (Rank i = 0; i < kRanks; ++i) {
    const Rank source = i * 7 % kRanks;
    sizes[source] = static_cast<std::size_t>(random.below(random.below(4) == 0 ? 5000 : 100));
    places[source] = kept.add(source, message_of(source, sizes[source]));
  }
  const KeptMessages moved = std::move(kept);
  const std::vector<ConstBytes> messages = moved.by_source(kRanks);
  for (Rank source = 0; source < kRanks; ++source) {
    EXPECT_EQ(messages[source].size(), sizes[source]);
    EXPECT(messages[source].data() == places[source].data());
    EXPECT(reinterpret_cast<std::uintptr_t>(messages[source].data()) % 8 == 0);
    EXPECT(std::ranges::all_of(messages[source], [&](std::byte byte) { return byte == static_cast<std::byte>(source); }));
  }
}

TEST("whoever did not send has what is said for it; an empty message is one") {
  const Buffer missing = message_of(9, 16);
  KeptMessages kept;
  EXPECT_EQ(kept.by_source(2, missing.bytes())[1].size(), 16);
  kept.add(1, Buffer(0));
  const std::vector<ConstBytes> messages = kept.by_source(3, missing.bytes());
  EXPECT_EQ(messages[0].size(), 16);
  EXPECT_EQ(messages[1].size(), 0);
  EXPECT(messages[2].data() == missing.data());
}

TEST("of size-only messages the heads are kept, and their sizes") {
  const SizeOnly active;
  KeptMessages kept;
  for (Rank source = 0; source < 100; ++source) {
    Buffer message(std::size_t{1} << 30);
    std::memset(message.data(), static_cast<int>(source), SizeOnly::kHeadBytes);
    kept.add(source, std::move(message));
  }
  const std::vector<ConstBytes> messages = kept.by_source(100);
  for (Rank source = 0; source < 100; ++source) {
    EXPECT_EQ(messages[source].size(), std::size_t{1} << 30);
    const ConstBytes head = messages[source].first(SizeOnly::kHeadBytes);
    EXPECT(std::ranges::all_of(head, [&](std::byte byte) { return byte == static_cast<std::byte>(source); }));
  }
}

}  // namespace
