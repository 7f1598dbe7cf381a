// The network of the simulator: its costs on two levels, what goes wrong in it, and what it writes down.
#include "testing.hpp"

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "collectives/dense/allreduce_recursive_doubling.hpp"
#include "collectives/dense/barrier.hpp"
#include "simulation/simulation.hpp"

namespace {

using namespace telegrad;

constexpr SimCosts kPlain{.alpha_s = 10e-6, .beta_s_per_byte = 1e-9};
constexpr std::size_t kBytes = 100'000;
constexpr double kMessage_s = kBytes * 1e-9;

RequestPtr program(std::function<Task<void>(Transport&)> body) {
  return std::make_shared<Request>(Call{.operation = Operation::broadcast}, std::move(body));
}

struct Transfer {
  Rank from;
  Rank to;
};

// All transfers at once, each of kBytes; when the last is over.
double time_of(Rank size, const SimCosts& costs, std::vector<Transfer> transfers) {
  const std::vector<std::byte> data(kBytes);
  std::vector<Buffer> received;
  for (std::size_t i = 0; i < transfers.size(); ++i) received.emplace_back(kBytes);
  Simulation simulation(size, {.costs = costs});
  simulation.begin_all([&](Rank) {
    return program([&](Transport& net) -> Task<void> {
      std::deque<Transport::Sending> sends;
      std::deque<Transport::Receiving> receives;
      for (std::size_t i = 0; i < transfers.size(); ++i) {
        const auto step = static_cast<Step>(i);
        if (transfers[i].from == net.rank()) sends.emplace_back(net, transfers[i].to, step, data);
        if (transfers[i].to == net.rank()) receives.emplace_back(net, transfers[i].from, step, received[i].bytes());
      }
      for (auto& sending : sends) co_await sending;
      for (auto& receiving : receives) co_await receiving;
    });
  });
  const Outcome outcome = simulation.run();
  EXPECT(!outcome.deadlock);
  return outcome.finish_s;
}

TEST("inside a node messages cost less, between nodes they pass uplinks that ranks share") {
  SimCosts costs = kPlain;
  costs.ranks_per_node = 4;
  costs.node_alpha_s = 1e-6;
  costs.node_beta_s_per_byte = 1e-10;
  EXPECT_NEAR(time_of(8, costs, {{0, 1}}), 1e-6 + kBytes * 1e-10, 1e-12);
  EXPECT_NEAR(time_of(8, costs, {{0, 4}}), 10e-6 + kMessage_s, 1e-12);
  // An uplink that is not over-subscribed carries what all ports of its node can.
  const std::vector<Transfer> all = {{0, 4}, {1, 5}, {2, 6}, {3, 7}};
  EXPECT_NEAR(time_of(8, costs, all), 10e-6 + kMessage_s, 1e-9);
  costs.oversubscription = 4.0;  // as one port: one after the other
  EXPECT_NEAR(time_of(8, costs, all), 10e-6 + 4.0 * kMessage_s, 1e-9);
  EXPECT_NEAR(time_of(8, costs, {{0, 1}, {2, 3}}), 1e-6 + kBytes * 1e-10, 1e-12);
  costs.oversubscription = 8.0;  // narrower than a port
  EXPECT_NEAR(time_of(8, costs, {{0, 4}}), 10e-6 + 2.0 * kMessage_s, 1e-9);
  // A message that waits for its port out does not hold a place in the uplink.
  costs.oversubscription = 4.0;
  EXPECT_NEAR(time_of(8, costs, {{0, 1}, {0, 4}, {1, 5}}), 10e-6 + 2.0 * kMessage_s, 1e-9);
}

TEST("two ranks that send to each other at once may lose duplex; others do not") {
  SimCosts costs = kPlain;
  costs.beta_exchange_s_per_byte = 2e-9;
  EXPECT_NEAR(time_of(2, costs, {{0, 1}}), 10e-6 + kMessage_s, 1e-12);
  EXPECT_NEAR(time_of(2, costs, {{0, 1}, {1, 0}}), 10e-6 + 2.0 * kMessage_s, 1e-12);
  EXPECT_NEAR(time_of(3, costs, {{0, 1}, {1, 2}, {2, 0}}), 10e-6 + kMessage_s, 1e-12);
  // What waits behind another message is not being sent.
  EXPECT_NEAR(time_of(3, costs, {{1, 2}, {1, 0}, {0, 1}}), 10e-6 + 2.0 * kMessage_s, 1e-9);
}

TEST("two levels of equal costs that are not over-subscribed are one level") {
  for (const Rank ranks : {8U, 16U}) {
    const auto measure = [ranks](const SimCosts& costs) {
      std::vector<std::vector<float>> rows(ranks, std::vector<float>(10'000, 1.0F));
      Simulation simulation(ranks, {.costs = costs});
      simulation.begin_all([&](Rank rank) {
        const Bytes mine = std::as_writable_bytes(std::span(rows[rank]));
        return program([mine](Transport& net) {
          return allreduce_recursive_doubling(net, DType::f32, Reduction::sum, mine, mine);
        });
      });
      return simulation.run().finish_s;
    };
    SimCosts costs = kPlain;
    costs.ranks_per_node = 4;
    costs.node_alpha_s = costs.alpha_s;
    costs.node_beta_s_per_byte = costs.beta_s_per_byte;
    EXPECT_NEAR(measure(costs), measure(kPlain), 1e-12);
  }
}

TEST("noise makes work and starts later, by seed, and never earlier") {
  std::vector<float> values(1000, 1.0F);
  const auto measure = [&](double compute_noise, double start_noise_s, std::uint64_t seed) {
    SimCosts costs = kPlain;
    costs.gamma_s_per_byte = 1e-9;
    costs.compute_noise = compute_noise;
    costs.start_noise_s = start_noise_s;
    std::vector<std::vector<float>> rows(4, values);
    Simulation simulation(4, {.costs = costs, .seed = seed});
    simulation.begin_all([&](Rank rank) {
      const Bytes mine = std::as_writable_bytes(std::span(rows[rank]));
      return program([mine](Transport& net) {
        return allreduce_recursive_doubling(net, DType::f32, Reduction::sum, mine, mine);
      });
    });
    return simulation.run().finish_s;
  };
  const double plain_s = measure(0.0, 0.0, 1);
  EXPECT_NEAR(plain_s, 2.0 * (10e-6 + 8e-6), 1e-9);
  EXPECT(measure(1.0, 0.0, 1) > plain_s && measure(1.0, 0.0, 1) < plain_s + 2.0 * 4e-6);
  EXPECT(measure(0.0, 1.0, 1) > plain_s && measure(0.0, 1.0, 1) < plain_s + 1.0);
  EXPECT_EQ(measure(0.5, 0.5, 7), measure(0.5, 0.5, 7));
  EXPECT(measure(0.5, 0.5, 7) != measure(0.5, 0.5, 8));
}

struct Trial {
  explicit Trial(Rank size, std::vector<SimFault> faults, std::uint32_t operations = 1, SimCosts costs = kPlain)
      : rows(operations, std::vector<std::vector<float>>(size, std::vector<float>(1000, 1.0F))),
        simulation(size, {.costs = costs,
                          .session = {.timeout_s = 60.0, .liveness_timeout_s = 2.0},
                          .clocks = true,
                          .faults = std::move(faults)}) {
    for (auto& row : rows) {
      simulation.begin_all([&](Rank rank) {
        const Bytes mine = std::as_writable_bytes(std::span(row[rank]));
        return requests.emplace_back(std::make_shared<Request>(
            Call{.operation = Operation::allreduce}, [mine](Transport& net) {
              return allreduce_recursive_doubling(net, DType::f32, Reduction::sum, mine, mine);
            }));
      });
    }
    outcome = simulation.run(1000.0);
  }
  bool succeeded(Rank rank) const {
    const auto& request = requests[rank];
    return request->done() && !request->failure() &&
           rows[0][rank] == std::vector<float>(1000, static_cast<float>(simulation.size()));
  }
  std::vector<std::vector<std::vector<float>>> rows;
  Simulation simulation;
  std::vector<RequestPtr> requests;
  Outcome outcome;
};

TEST("a rank may die at any event: the survivors name it, or had finished") {
  constexpr Rank kRanks = 5;
  const std::uint64_t events = Trial(kRanks, {}).simulation.network().events();
  std::size_t failures = 0;
  for (std::uint64_t at = 0; at < events; ++at) {
    const Trial trial(kRanks, {{.kind = SimFaultKind::kill, .rank = 2, .at_event = at, .detect_s = 1e-4}});
    EXPECT(!trial.outcome.deadlock);
    EXPECT(trial.simulation.died(2));
    for (Rank rank = 0; rank < kRanks; ++rank) {
      const auto& request = trial.requests[rank];
      if (rank == 2) continue;
      REQUIRE(request->done());
      if (!request->failure()) {
        EXPECT(trial.succeeded(rank));
        continue;
      }
      ++failures;
      EXPECT_EQ(request->failure()->kind, FailureKind::peer_failed);
      EXPECT_EQ(request->failure()->peer, 2);
    }
  }
  EXPECT(failures > events);
}

TEST("a rank that is frozen for ever is named; one that wakes in time goes on; one that wakes too late gives itself up") {
  const auto frozen = [](double duration_s) {
    return Trial(4, {{.kind = SimFaultKind::freeze, .rank = 1, .at_event = 15, .duration_s = duration_s}}, 1);
  };
  for (const double duration_s : {10.0, std::numeric_limits<double>::infinity()}) {
    const Trial trial = frozen(duration_s);
    EXPECT(!trial.outcome.deadlock);
    for (const Rank rank : {0U, 2U, 3U}) {
      REQUIRE(trial.requests[rank]->failure());
      EXPECT_EQ(trial.requests[rank]->failure()->kind, FailureKind::peer_failed);
      EXPECT_EQ(trial.requests[rank]->failure()->peer, 1);
    }
  }
  const Trial woken = frozen(10.0);
  REQUIRE(woken.requests[1]->failure());
  EXPECT_EQ(woken.requests[1]->failure()->peer, 1);
  const Trial brief = frozen(0.5);
  for (Rank rank = 0; rank < 4; ++rank) EXPECT(brief.succeeded(rank));
  EXPECT(brief.outcome.finish_s > 0.5);
}

TEST("slow links, slow ranks and messages that come late change times, not results") {
  const double plain_s = Trial(4, {}).outcome.finish_s;
  const std::vector<SimFault> faults = {
      {.kind = SimFaultKind::slow_link, .rank = 0, .peer = 1, .factor = 10.0},
      {.kind = SimFaultKind::slow_rank, .rank = 3, .factor = 10.0},
      {.kind = SimFaultKind::hold, .rank = 2, .nth = 1, .duration_s = 1.0},
  };
  for (const SimFault& fault : faults) {
    const Trial trial(4, {fault});
    for (Rank rank = 0; rank < 4; ++rank) EXPECT(trial.succeeded(rank));
    EXPECT(trial.outcome.finish_s > 1.5 * plain_s);
  }
}

TEST("messages overtake a late one; control messages never overtake each other") {
  SimCosts costs = kPlain;
  costs.jitter = 50.0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Trial trial(4, {{.kind = SimFaultKind::hold, .rank = 0, .nth = 0, .duration_s = 1.0}}, 6, costs);
    for (const auto& request : trial.requests) EXPECT(request->done() && !request->failure());
    for (const auto& row : trial.rows) EXPECT_EQ(row[3], std::vector<float>(1000, 4.0F));
  }
}

TEST("a damaged message ends in an error of whoever needs it, never in a wrong sum") {
  for (const SimDamage damage : {SimDamage::truncated, SimDamage::lengthened, SimDamage::other_step,
                                 SimDamage::other_call, SimDamage::far_sequence}) {
    const Trial trial(4, {{.kind = SimFaultKind::damage, .rank = 2, .nth = 1, .damage = damage}});
    EXPECT(!trial.outcome.deadlock);
    std::size_t failures = 0;
    for (Rank rank = 0; rank < 4; ++rank) {
      REQUIRE(trial.requests[rank]->done());
      const auto& failure = trial.requests[rank]->failure();
      if (!failure) {
        EXPECT(trial.succeeded(rank));  // the last round is over where the message was not needed
        continue;
      }
      ++failures;
      if (damage != SimDamage::far_sequence) EXPECT_EQ(failure->peer, 2);
    }
    EXPECT(failures > 0);
  }
  const Trial stray(4, {{.kind = SimFaultKind::damage, .rank = 2, .nth = 1, .damage = SimDamage::stray}});
  for (Rank rank = 0; rank < 4; ++rank) EXPECT(stray.succeeded(rank));
  const Trial twice(4, {{.kind = SimFaultKind::damage, .rank = 2, .nth = 1, .damage = SimDamage::duplicated}});
  for (Rank rank = 0; rank < 4; ++rank) {
    REQUIRE(twice.requests[rank]->done());
    EXPECT(twice.requests[rank]->failure() || twice.succeeded(rank));
  }
}

TEST("actions happen in their order among a rank's operations") {
  Simulation simulation(2, {.clocks = true});
  std::vector<RequestPtr> requests;
  const auto barriers = [&](Rank) {
    return requests.emplace_back(
        std::make_shared<Request>(Call{.operation = Operation::barrier}, [](Transport& net) { return barrier(net); }));
  };
  simulation.begin_all(barriers);
  simulation.act(1, [](Session& session) { session.part(); }, 1.0);
  simulation.begin_all(barriers, 2.0);
  EXPECT(!simulation.run(100.0).deadlock);
  EXPECT(!requests[0]->failure() && !requests[1]->failure());
  REQUIRE(requests[2]->failure());
  EXPECT_EQ(requests[2]->failure()->peer, 1);
  REQUIRE(requests[3]->failure());
}

TEST("the timeline and the links tell what passed the ports") {
  Simulation simulation(4, {.costs = {.alpha_s = 1e-6, .beta_s_per_byte = 1e-9, .gamma_s_per_byte = 1e-9}});
  simulation.network().keep_timeline();
  simulation.network().keep_links();
  std::vector<std::vector<float>> rows(4, std::vector<float>(250, 1.0F));
  simulation.begin_all([&](Rank rank) {
    const Bytes mine = std::as_writable_bytes(std::span(rows[rank]));
    return program([mine](Transport& net) {
      return allreduce_recursive_doubling(net, DType::f32, Reduction::sum, mine, mine);
    });
  });
  const double finish_s = simulation.run().finish_s;
  const auto& timeline = simulation.network().timeline();
  const auto count = [&](SimActivity::Kind kind) { return std::ranges::count(timeline, kind, &SimActivity::kind); };
  EXPECT_EQ(count(SimActivity::Kind::send), 8);
  EXPECT_EQ(count(SimActivity::Kind::receive), 8);
  EXPECT_EQ(count(SimActivity::Kind::compute), 8);
  double last_s = 0.0;
  for (const SimActivity& activity : timeline) {
    EXPECT_NEAR(activity.end_s - activity.start_s, 1e-6, 1e-15);
    EXPECT_EQ(activity.bytes, 1000);
    last_s = std::max(last_s, activity.end_s);
  }
  EXPECT_NEAR(last_s, finish_s, 1e-15);
  const auto links = simulation.network().links();
  REQUIRE(links.size() == 8);
  EXPECT(links[0].from == 0 && links[0].to == 1 && links[1].to == 2 && links[7].from == 3 && links[7].to == 2);
  for (const SimLinkCounts& link : links) EXPECT(link.messages == 1 && link.bytes == 1000);
}

}  // namespace
