// The protocol of several ranks in virtual time: time-outs, liveness, aborts, and many operations in flight.
#include "testing.hpp"

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collectives/dense/barrier.hpp"
#include "drivers/sim/sim_driver.hpp"
#include "simulation/simulation.hpp"

namespace {

using namespace telegrad;

RequestPtr request(Request::Body body) {
  return std::make_shared<Request>(Call{.operation = Operation::barrier}, std::move(body));
}
RequestPtr barrier_request() {
  return request([](Transport& net) { return barrier(net); });
}

TEST("a rank that never calls times the others out, and all name it") {
  constexpr Rank kRanks = 5;
  constexpr Rank kAbsent = 3;
  Simulation simulation(kRanks, {.session = {.timeout_s = 20.0}, .clocks = true});
  std::vector<RequestPtr> requests;
  for (Rank rank = 0; rank < kRanks; ++rank) {
    if (rank != kAbsent) simulation.begin(rank, requests.emplace_back(barrier_request()));
  }
  const Outcome outcome = simulation.run();
  EXPECT(!outcome.deadlock);
  EXPECT_NEAR(outcome.finish_s, 20.0, 0.01);
  for (const auto& ended : requests) {
    REQUIRE(ended->failure());
    EXPECT_EQ(ended->failure()->kind, FailureKind::timeout);
    EXPECT(ended->failure()->reason.find("timeout_s=20") != std::string::npos);
    EXPECT(ended->failure()->reason.find("rank 3 has not called it") != std::string::npos);
    EXPECT_EQ(ended->failure()->peer, kAbsent);
  }
}

TEST("after a time-out a rank is listened to whose word comes later than after other failures") {
  constexpr double kLatency_s = 0.1;  // there and back is longer than agreement_s
  Simulation simulation(3, {.costs = {.alpha_s = kLatency_s}, .session = {.timeout_s = 20.0}, .clocks = true});
  std::vector<RequestPtr> requests;
  for (const Rank rank : {0, 2}) simulation.begin(rank, requests.emplace_back(barrier_request()));
  simulation.run();
  for (const auto& ended : requests) {
    REQUIRE(ended->failure());
    EXPECT_EQ(ended->failure()->kind, FailureKind::timeout);
    EXPECT_EQ(ended->failure()->peer, 1);
    EXPECT(ended->failure()->reason.find("rank 1 has not called it") != std::string::npos);
  }
}

TEST("a call that is late but not too late succeeds") {
  Simulation simulation(4, {.session = {.timeout_s = 20.0}, .clocks = true});
  std::vector<RequestPtr> requests;
  for (Rank rank = 0; rank < 4; ++rank) {
    simulation.begin(rank, requests.emplace_back(barrier_request()), rank == 2 ? 19.9 : 0.0);
  }
  EXPECT_NEAR(simulation.run().finish_s, 19.9, 0.01);
  for (const auto& ended : requests) EXPECT(ended->done() && !ended->failure());
}

TEST("all ranks join, and a session that falls silent is taken for dead") {
  Simulation simulation(3, {.session = {.liveness_timeout_s = 4.0}, .clocks = true});
  simulation.begin_all([](Rank) { return barrier_request(); });
  simulation.run();
  for (Rank rank = 0; rank < 3; ++rank) EXPECT(simulation.session(rank).joined());

  simulation.network().driver(1).shut_down();
  const auto first = barrier_request();
  simulation.begin(0, first, 10.0);
  simulation.run();
  REQUIRE(first->failure());
  EXPECT_EQ(first->failure()->kind, FailureKind::peer_failed);
  EXPECT_EQ(first->failure()->peer, 1);
  EXPECT(first->failure()->reason.find("liveness_timeout_s") != std::string::npos);
  EXPECT(simulation.now_s() < 16.0);
}

TEST("one rank's failure reaches all others with its culprit and reason") {
  constexpr Rank kRanks = 6;
  Simulation simulation(kRanks, {});
  std::vector<RequestPtr> requests;
  simulation.begin_all([&](Rank) {
    return requests.emplace_back(request([](Transport& net) -> Task<void> {
      co_await barrier(net);
      if (net.rank() == 4) co_await net.fail(2, "rank 2 sent nonsense");
      co_await barrier(net, 100);
    }));
  });
  EXPECT(!simulation.run().deadlock);
  for (Rank rank = 0; rank < kRanks; ++rank) {
    REQUIRE(requests[rank]->failure());
    EXPECT_EQ(requests[rank]->failure()->peer, 2);
    EXPECT_EQ(requests[rank]->failure()->rank, rank);
    EXPECT(requests[rank]->failure()->reason.find("rank 2 sent nonsense") != std::string::npos);
  }
}

TEST("ranks that wait for each other in different calls, without a message between them, hear of it at once") {
  Simulation simulation(3, {.clocks = true});
  std::vector<RequestPtr> requests;
  for (Rank rank = 0; rank < 3; ++rank) {
    // Rank 1 thinks that rank 0 is the root, the others that rank 1 is: nobody sends.
    const Rank root = rank == 1 ? 0 : 1;
    simulation.begin(rank, requests.emplace_back(std::make_shared<Request>(
                               Call{.operation = Operation::broadcast, .root = root},
                               [root](Transport& net) -> Task<void> { co_await net.receive(root, 0, {}); })));
  }
  EXPECT(simulation.run().finish_s < 0.1);
  for (const auto& ended : requests) {
    REQUIRE(ended->failure());
    EXPECT_EQ(ended->failure()->kind, FailureKind::mismatched_call);
    EXPECT_EQ(ended->failure()->peer, 1);
    EXPECT(ended->failure()->reason.find("ranks 0, 2 called broadcast") != std::string::npos);
  }
}

TEST("ranks that have not come to a mismatch yet say what they call when they do, and decide who is right") {
  for (const bool in_time : {true, false}) {
    Simulation simulation(4, {.clocks = true});
    std::vector<RequestPtr> requests;
    const auto begin = [&](Rank rank, double at_s) {
      const Call call{.operation = Operation::barrier, .count = rank == 0 ? 1U : 0U};
      const auto barriers = std::make_shared<Request>(call, [](Transport& net) { return barrier(net); });
      simulation.begin(rank, requests.emplace_back(barriers), at_s);
    };
    begin(0, 0.0);
    begin(1, 0.0);
    begin(2, in_time ? 1.0 : 20.0);
    begin(3, in_time ? 2.0 : 20.0);
    const Outcome outcome = simulation.run();
    EXPECT(!outcome.deadlock);
    for (const auto& ended : requests) {
      REQUIRE(ended->failure());
      EXPECT_EQ(ended->failure()->kind, FailureKind::mismatched_call);
      EXPECT_EQ(ended->failure()->peer, in_time ? 0 : 1);  // of two that differ nobody can say who is right
    }
    if (in_time) EXPECT_NEAR(outcome.finish_s, 2.0, 0.01);
  }
}

TEST("the odd rank is named however many operations are in flight, and wherever the odd one is among them") {
  constexpr Rank kRanks = 3;
  for (const std::uint32_t flying : {40U, 100U}) {
    for (const std::uint32_t odd_call : {2U, flying / 2, flying - 5}) {
      for (Rank odd = 0; odd < kRanks; ++odd) {
        Simulation simulation(kRanks, {.costs = {.jitter = 20.0}, .seed = odd, .clocks = true});
        std::vector<RequestPtr> requests;
        for (std::uint32_t number = 0; number < flying; ++number) {
          simulation.begin_all([&](Rank rank) {
            const Call call{.operation = Operation::barrier, .count = number == odd_call && rank == odd ? 1U : 0U};
            return requests.emplace_back(std::make_shared<Request>(call, [](Transport& net) { return barrier(net); }));
          });
        }
        EXPECT(!simulation.run().deadlock);
        for (Rank rank = 0; rank < kRanks; ++rank) {
          // Later ones may have been over before anybody noticed.
          const auto& ended = requests[odd_call * kRanks + rank];
          REQUIRE(ended->failure());
          EXPECT_EQ(ended->failure()->kind, FailureKind::mismatched_call);
          EXPECT_EQ(ended->failure()->peer, odd);
          EXPECT(ended->failure()->reason.find("as operation " + std::to_string(odd_call)) != std::string::npos);
        }
      }
    }
  }
}

TEST("a rank that leaves in the middle of a dispute does not sit it out") {
  Simulation simulation(3, {.clocks = true});
  std::vector<RequestPtr> requests;
  for (Rank rank = 0; rank < 2; ++rank) {
    const Call call{.operation = Operation::barrier, .count = rank};
    simulation.begin(rank, requests.emplace_back(
                               std::make_shared<Request>(call, [](Transport& net) { return barrier(net); })));
  }
  simulation.run(0.5);
  EXPECT(!requests[0]->done());
  simulation.session(2).part();
  EXPECT(simulation.run().finish_s < 1.0);
  for (const auto& ended : requests) EXPECT(ended->failure().has_value());
  EXPECT(simulation.session(2).failure().has_value());
}

TEST("operations before a mismatch are finished") {
  Simulation simulation(3, {.clocks = true});
  std::vector<RequestPtr> first;
  std::vector<RequestPtr> second;
  for (Rank rank = 0; rank < 3; ++rank) {
    simulation.begin(rank, first.emplace_back(barrier_request()), rank == 2 ? 1.0 : 0.0);
    simulation.begin(rank, second.emplace_back(std::make_shared<Request>(
                               Call{.operation = Operation::broadcast, .root = rank == 1 ? 1U : 0U},
                               [](Transport& net) { return barrier(net); })),
                     rank == 2 ? 1.5 : 0.0);
  }
  EXPECT(!simulation.run().deadlock);
  for (const auto& ended : first) EXPECT(ended->done() && !ended->failure());
  for (const auto& ended : second) {
    REQUIRE(ended->failure());
    EXPECT_EQ(ended->failure()->peer, 1);
  }
}

TEST("all ranks name the same culprit of a mismatch, whoever finds it") {
  for (Rank size = 3; size <= 9; ++size) {
    for (Rank odd = 0; odd < size; ++odd) {
      Simulation simulation(size, {.costs = {.jitter = 20.0}, .seed = size, .clocks = true});
      std::vector<RequestPtr> requests;
      for (int number = 0; number < 3; ++number) {
        simulation.begin_all([&](Rank rank) {
          const Call call{.operation = Operation::barrier, .count = number == 1 && rank == odd ? 1U : 0U};
          return requests.emplace_back(
              std::make_shared<Request>(call, [](Transport& net) { return barrier(net); }));
        });
      }
      EXPECT(!simulation.run().deadlock);
      for (const auto& ended : requests) {
        REQUIRE(ended->done());
        if (!ended->failure()) continue;  // the first barrier
        EXPECT_EQ(ended->failure()->kind, FailureKind::mismatched_call);
        EXPECT_EQ(ended->failure()->peer, odd);
      }
      for (Rank rank = 0; rank < size; ++rank) EXPECT(requests.back()->failure().has_value());
    }
  }
}

TEST("calls that are refused after a failure do not push what led to it out of the report") {
  Simulation simulation(2, {.clocks = true});
  std::vector<RequestPtr> requests;
  const auto begin_all = [&] {
    simulation.begin_all([&](Rank rank) {
      const Call call{.operation = Operation::barrier, .count = requests.size() < 4 ? 0U : rank};
      return requests.emplace_back(std::make_shared<Request>(call, [](Transport& net) { return barrier(net); }));
    });
    simulation.run();
  };
  for (std::uint32_t number = 0; number < 100; ++number) begin_all();
  const SessionReport report = simulation.session(0).report(simulation.now_s());
  EXPECT_EQ(report.called, 3);
  REQUIRE(report.operations.size() == 3);
  EXPECT(report.operations[1].entry.state == OperationState::completed);
  EXPECT(report.operations[2].entry.state == OperationState::failed);
  REQUIRE(requests.back()->failure());
  EXPECT_EQ(requests.back()->failure()->sequence, 99);
}

TEST("many operations in flight, begun at different times, do not mix") {
  constexpr Rank kRanks = 5;
  constexpr int kOperations = 20;
  Simulation simulation(kRanks, {.costs = {.jitter = 50.0}, .seed = 3});
  std::deque<std::uint64_t> words(2 * kRanks * kOperations);
  std::vector<RequestPtr> requests;
  for (std::uint64_t i = 0; i < kOperations; ++i) {
    simulation.begin_all([&](Rank rank) {
      auto& sent = words[2 * (i * kRanks + rank)];
      auto& received = words[2 * (i * kRanks + rank) + 1];
      sent = 100 * i + rank;
      return requests.emplace_back(request([&](Transport& net) -> Task<void> {
        auto sending = net.send((net.rank() + 1) % net.size(), 0, std::as_bytes(std::span(&sent, 1)));
        co_await net.receive((net.rank() + net.size() - 1) % net.size(), 0,
                             std::as_writable_bytes(std::span(&received, 1)));
        co_await sending;
      }));
    });
  }
  EXPECT(!simulation.run().deadlock);
  for (const auto& ended : requests) EXPECT(ended->done() && !ended->failure());
  for (std::uint64_t i = 0; i < kOperations; ++i) {
    for (std::uint64_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(words[2 * (i * kRanks + rank) + 1], 100 * i + (rank + kRanks - 1) % kRanks);
    }
  }
}

}  // namespace
