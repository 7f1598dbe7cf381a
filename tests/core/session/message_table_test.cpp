// The table of an operation's messages, against a std::map.
#include "testing.hpp"

#include <map>
#include <utility>

#include "base/random.hpp"
#include "session/message_table.hpp"

namespace {

using namespace telegrad;

TEST("inserts and takes in any order agree with a map") {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Random random(seed);
    MessageTable<int> table;
    std::map<std::pair<Rank, Step>, int> expected;
    const std::uint64_t ranks = 1 + random.below(40);
    for (int i = 0; i < 2000; ++i) {
      const auto source = static_cast<Rank>(random.below(ranks));
      const auto step = static_cast<Step>(random.below(8));
      if (random.below(2) == 0) {
        EXPECT_EQ(table.insert(source, step, i), expected.emplace(std::pair(source, step), i).second);
      } else {
        const auto found = expected.find({source, step});
        const auto taken = table.take(source, step);
        EXPECT_EQ(taken.has_value(), found != expected.end());
        if (!taken) continue;
        EXPECT_EQ(*taken, found->second);
        expected.erase(found);
      }
      EXPECT_EQ(table.empty(), expected.empty());
    }
    std::multimap<Rank, int> left;
    table.for_each([&](Rank source, int value) { left.emplace(source, value); });
    EXPECT_EQ(left.size(), expected.size());
    for (const auto& [key, value] : expected) {
      bool found = false;
      for (auto [at, end] = left.equal_range(key.first); at != end; ++at) found |= at->second == value;
      EXPECT(found);
    }
  }
}

}  // namespace
