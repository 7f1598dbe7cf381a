// Communicators that C++ programs split from others, among ranks of this process.
#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

#include "public_ranks.hpp"
#include "public_split_checks.hpp"
#include "telegrad/telegrad.hpp"
#include "testing.hpp"

using telegrad::Communicator;
using telegrad::Rank;

TEST("groups of threads are those of naive counting, and sum among themselves") {
  for (const Rank size : {1U, 2U, 3U, 5U}) on_ranks(size, telegrad_checks::check_groups);
}

TEST("what ends a group leaves the communicator that it came from") {
  for (const Rank size : {2U, 3U, 5U}) on_ranks(size, telegrad_checks::check_failures);
}

TEST("a group outlives the communicator that it came from") {
  on_ranks(3, [](Communicator& comm) {
    std::optional<Communicator> part = comm.split(0);
    comm.close();
    std::vector<int> x{1};
    part->all_reduce(x).wait();
    EXPECT_EQ(x[0], 3);
    std::optional<Communicator> again = part->split(part->rank() == 1 ? 1 : 2);
    EXPECT_EQ(again->size(), part->rank() == 1 ? 1U : 2U);
  });
}

TEST("groups have the time-outs of the communicator that they came from") {
  auto two = Communicator::local(2, {.timeout_s = 1.0});
  std::optional<Communicator> other;
  {
    const std::jthread thread([&] { other = two[1].split(3); });
    std::optional<Communicator> mine = two[0].split(3);
    EXPECT_THROWS(telegrad::TimeoutExpired, "split(color=3)", mine->barrier().wait());
  }
  EXPECT_THROWS(telegrad::TimeoutExpired, "", two[0].split(1));  // the other does not call it
}

TEST("a color that is none is refused before anything is sent") {
  auto alone = Communicator::local(1);
  constexpr std::uint64_t kMost = (std::uint64_t{1} << 63) - 1;
  EXPECT_THROWS(std::invalid_argument, "color=9223372036854775808 must be below 2^63, or empty", alone[0].split(kMost + 1));
  EXPECT_EQ(alone[0].split(kMost)->size(), 1U);
}
