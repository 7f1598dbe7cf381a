// What split() says where a rank cannot open its network: the way over a network, with one that is made up.
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "api/joined.hpp"
#include "telegrad/communicator.hpp"
#include "testing.hpp"

using namespace telegrad;

namespace {

constexpr Rank kRanks = 4;
constexpr Rank kWithout = 2;

// Ranks of this process whose groups would be joined over a network that rank kWithout cannot open.
std::vector<api::Communicator> ranks_with_a_network() {
  const api::Options options{.timeout_s = 30.0};
  std::vector<api::Communicator> all;
  for (api::detail::CorePtr& core : api::detail::made_local(kRanks, options, nullptr)) {
    auto joined = std::make_shared<api::detail::Joined>();
    joined->connect = [core](Rank, Rank, CommunicatorOptions, const Exchange& exchange) -> api::detail::CorePtr {
      if (core->rank() == kWithout) throw TransportError({.rank = kWithout, .reason = "no such device"});
      exchange(std::vector<std::byte>(core->rank() + 1));
      throw TransportError({.rank = core->rank(), .reason = "exchange() gave addresses"});
    };
    joined->core = core;
    joined->options = options;
    all.emplace_back(std::move(joined));
  }
  return all;
}

}  // namespace

TEST("ranks of a group hear that one of them has no network, other groups do not, and the parent goes on") {
  auto ranks = ranks_with_a_network();
  std::vector<std::string> said(kRanks);
  {
    std::vector<std::jthread> threads;
    for (api::Communicator& comm : ranks) {
      threads.emplace_back([&] {
        try {
          if (comm.rank() == kRanks - 1) {
            said[comm.rank()] = comm.split(std::nullopt) ? "a group" : "none";
          } else {
            (void)comm.split(comm.rank() == 0 ? 1 : 2);
          }
        } catch (const api::TransportError& error) {
          said[comm.rank()] = error.what();
          if (comm.rank() == 1) {
            EXPECT_EQ(*error.peer(), kWithout);
            EXPECT_EQ(error.operation(), std::string("split"));
          }
        }
        comm.barrier().wait();
      });
    }
  }
  const auto says = [&](Rank rank, const char* text) {
    if (said[rank].find(text) == std::string::npos) testing::fail(__FILE__, __LINE__, said[rank]);
  };
  says(0, "exchange() gave addresses");  // its group is of itself
  says(1, "rank 1: rank 2 could not open its network for the group that it shares with this one: look at the log");
  says(2, "no such device");
  says(2, "[split(color=2): ");
  says(3, "none");
}
