// Messages between two ranks: their order, their matching, and how they end when a peer does; in virtual time with
// messages that overtake each other, and in one process.
#include "testing.hpp"

#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collectives/dense/barrier.hpp"
#include "session/messages.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr int kSeeds = 40;

SimulationOptions unruly(std::uint64_t seed, SessionOptions session = {}, bool clocks = false) {
  return {.costs = {.jitter = 20.0}, .seed = seed, .session = session, .clocks = clocks};
}

// Memory that stays where it is.
struct Memory {
  std::deque<std::vector<float>> kept;
  std::vector<float>& of(std::size_t count, float value) { return kept.emplace_back(count, value); }
};

RequestPtr send(std::vector<float>& data, Rank to, Step tag = 0) {
  return make_send(DType::f32, std::as_bytes(std::span(data)), to, tag);
}
RequestPtr receive(std::vector<float>& data, Rank source, Step tag = 0) {
  return make_receive(DType::f32, std::as_writable_bytes(std::span(data)), source, tag);
}
RequestPtr barrier_request() {
  return std::make_shared<Request>(Call{.operation = Operation::barrier}, [](Transport& net) { return barrier(net); });
}
bool succeeded(const RequestPtr& request) { return request->done() && !request->failure(); }

// Rank 0 sends `count` messages with tags in turn, rank 1 receives them, tag by tag; `begin(rank, request, at_s)`.
template <class Begin, class Run>
void exchange_many(std::size_t count, Step tags, bool posted_first, Begin begin, Run run) {
  Memory memory;
  std::vector<RequestPtr> requests;
  std::vector<std::pair<std::vector<float>*, float>> wanted;
  const double sent_s = posted_first ? 1.0 : 0.0;
  const auto send_all = [&] {
    for (std::size_t i = 0; i < count; ++i) {
      auto& data = memory.of(1 + i % 7, static_cast<float>(i));
      begin(0, requests.emplace_back(send(data, 1, static_cast<Step>(i % tags))), sent_s);
    }
  };
  const auto receive_all = [&] {
    for (Step tag = tags; tag-- > 0;) {
      for (std::size_t i = tag; i < count; i += tags) {
        auto& data = memory.of(1 + i % 7, -1.0F);
        wanted.emplace_back(&data, static_cast<float>(i));
        begin(1, requests.emplace_back(receive(data, 0, tag)), 1.0 - sent_s);
      }
    }
  };
  if (posted_first) {
    receive_all();
    send_all();
  } else {
    send_all();
    receive_all();
  }
  run();
  for (const auto& request : requests) EXPECT(succeeded(request));
  for (const auto& [data, value] : wanted) {
    for (const float x : *data) EXPECT_EQ(x, value);
  }
}

TEST("messages of one tag are received in the order of their sends, posted before or after, among overtaking ones") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const bool posted_first : {true, false}) {
      Simulation simulation(3, unruly(seed));
      exchange_many(
          100, 1 + static_cast<Step>(seed % 5), posted_first,
          [&](Rank rank, RequestPtr request, double at_s) { simulation.begin(rank, std::move(request), at_s); },
          [&] { EXPECT(!simulation.run().deadlock); });
      EXPECT_EQ(simulation.session(1).counters().messages_received, 100);
      EXPECT_EQ(simulation.session(0).counters().messages_sent, 100);
    }
  }
}

TEST("the same holds between ranks of one process") {
  for (const Step tags : {1U, 3U}) {
    for (const bool posted_first : {true, false}) {
      LocalRanks ranks(2);
      exchange_many(
          1000, tags, posted_first,
          [&](Rank rank, RequestPtr request, double) { ranks.session(rank).begin(std::move(request), 0.0); },
          [&] { ranks.run(); });
    }
  }
}

TEST("sends and receives take no number: ranks that make none stay in step with those that do") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Simulation simulation(4, unruly(seed));
    Memory memory;
    std::vector<RequestPtr> requests;
    auto& got = memory.of(5, 0.0F);
    const auto begin = [&](Rank rank, RequestPtr request) { simulation.begin(rank, requests.emplace_back(request)); };
    begin(2, receive(got, 0, 9));
    for (int round = 0; round < 3; ++round) {
      for (Rank rank = 0; rank < 4; ++rank) begin(rank, barrier_request());
      if (round == 1) begin(0, send(memory.of(5, 7.0F), 2, 9));
    }
    EXPECT(!simulation.run().deadlock);
    for (const auto& request : requests) EXPECT(succeeded(request));
    EXPECT_EQ(got[4], 7.0F);
    const SessionReport report = simulation.session(2).report(1.0);
    EXPECT_EQ(report.called, 3);
    EXPECT_EQ(report.completed, 3);
  }
}

TEST("a ring of sends and receives at once does not wait for itself") {
  constexpr Rank kRanks = 5;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Simulation simulation(kRanks, unruly(seed));
    Memory memory;
    std::vector<std::vector<float>*> got;
    for (Rank rank = 0; rank < kRanks; ++rank) {
      got.push_back(&memory.of(100'000, -1.0F));
      simulation.begin(rank, receive(*got.back(), (rank + kRanks - 1) % kRanks));
      simulation.begin(rank, send(memory.of(100'000, static_cast<float>(rank)), (rank + 1) % kRanks));
    }
    EXPECT(!simulation.run().deadlock);
    for (Rank rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ((*got[rank])[99'999], static_cast<float>((rank + kRanks - 1) % kRanks));
    }
  }
}

TEST("an empty message arrives too") {
  LocalRanks ranks(2);
  Memory memory;
  const auto sent = send(memory.of(0, 0.0F), 1);
  const auto received = receive(memory.of(0, 0.0F), 0);
  ranks.session(0).begin(sent, 0.0);
  ranks.run();
  EXPECT(!sent->done());  // here a message is taken when it is received
  ranks.session(1).begin(received, 0.0);
  ranks.run();
  EXPECT(succeeded(sent) && succeeded(received));
}

TEST("another dtype or length on the other side is a mismatch on all ranks, and nothing is written") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const bool other_length : {true, false}) {
      for (const Rank receiver : {0U, 2U}) {
        const Rank sender = 2 - receiver;
        Simulation simulation(4, unruly(seed, {}, true));
        Memory memory;
        auto& got = memory.of(6, -1.0F);
        auto& data = memory.of(other_length ? 5 : 6, 1.0F);
        const auto sent = make_send(other_length ? DType::f32 : DType::i32, std::as_bytes(std::span(data)), receiver, 3);
        std::vector<RequestPtr> requests{receive(got, sender, 3)};
        simulation.begin(receiver, requests[0]);
        simulation.begin(sender, sent);
        for (Rank rank = 0; rank < 4; ++rank) simulation.begin(rank, requests.emplace_back(barrier_request()), 0.5);
        EXPECT(!simulation.run().deadlock);
        for (const auto& ended : requests) {
          REQUIRE(ended->failure());
          EXPECT_EQ(ended->failure()->kind, FailureKind::mismatched_call);
          EXPECT_EQ(ended->failure()->peer, 2);  // of two that differ the lower one is taken for right
          EXPECT(ended->failure()->reason.find(other_length ? "send(count=5, dtype=f32, to=" : "dtype=i32, to=") !=
                 std::string::npos);
          EXPECT(ended->failure()->reason.find("recv(count=6, dtype=f32, source=") != std::string::npos);
        }
        EXPECT_EQ(*requests[0]->failure()->tag, 3);
        EXPECT(!requests[1]->failure()->tag);
        EXPECT_EQ(got[0], -1.0F);
      }
    }
  }
}

TEST("a receive of what is never sent times out and names its source and a message of another tag") {
  for (const bool wrong_tag : {true, false}) {
    Simulation simulation(3, unruly(1, {.timeout_s = 20.0}, true));
    Memory memory;
    std::vector<RequestPtr> requests;
    simulation.begin(0, requests.emplace_back(receive(memory.of(5, 0.0F), 2, 7)));
    if (wrong_tag) simulation.begin(2, send(memory.of(5, 0.0F), 0, 8), 1.0);  // over once rank 0 lets go of it
    EXPECT_NEAR(simulation.run().finish_s, 20.0, 0.01);
    simulation.begin(1, requests.emplace_back(barrier_request()));
    simulation.run();
    for (const auto& ended : requests) {
      REQUIRE(ended->failure());
      EXPECT_EQ(ended->failure()->kind, FailureKind::timeout);
      EXPECT_EQ(ended->failure()->peer, 2);
      const std::string& reason = ended->failure()->reason;
      EXPECT(reason.find("recv(count=5, dtype=f32, source=2, tag=7) of rank 0 timed out after timeout_s=20 s, waiting "
                         "for rank 2") != std::string::npos);
      EXPECT(reason.find("has not called it") == std::string::npos);
      EXPECT_EQ(reason.find("a message of rank 2 with tag 8 has come") != std::string::npos, wrong_tag);
    }
  }
}

TEST("a send that nobody receives times out where the network waits for its receiver") {
  Simulation simulation(3, unruly(1, {.timeout_s = 20.0}, true));
  Memory memory;
  const auto sent = send(memory.of(5, 0.0F), 1);
  simulation.begin(0, sent);
  EXPECT_NEAR(simulation.run().finish_s, 20.0, 0.01);
  REQUIRE(sent->failure());
  EXPECT_EQ(sent->failure()->kind, FailureKind::timeout);
  EXPECT_EQ(sent->failure()->peer, 1);
  EXPECT(sent->failure()->reason.find("rank 1 to take its message") != std::string::npos);
}

TEST("a death ends receives and sends with an error that names the dead") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    auto options = unruly(seed, {}, true);
    options.faults = {{.kind = SimFaultKind::kill, .rank = 1, .at_event = 3 + seed, .detect_s = 0.01}};
    Simulation simulation(4, options);
    Memory memory;
    std::vector<RequestPtr> requests;
    simulation.begin(0, requests.emplace_back(receive(memory.of(5, 0.0F), 1)), 1.0);
    simulation.begin(2, requests.emplace_back(send(memory.of(5, 0.0F), 1)), 1.0);
    simulation.begin(3, requests.emplace_back(receive(memory.of(5, 0.0F), 0)), 1.0);
    EXPECT(!simulation.run().deadlock);
    for (const auto& ended : requests) {
      REQUIRE(ended->failure());
      EXPECT_EQ(ended->failure()->kind, FailureKind::peer_failed);
      EXPECT_EQ(ended->failure()->peer, 1);
    }
  }
}

TEST("a goodbye that overtakes messages does not end the receives that they are for") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const bool posted_first : {true, false}) {
      Simulation simulation(2, unruly(seed, {}, true));
      Memory memory;
      std::vector<RequestPtr> requests;
      std::vector<std::vector<float>*> got;
      for (int i = 0; i < 5; ++i) simulation.begin(1, send(memory.of(5, static_cast<float>(i)), 0), 1.0);
      simulation.act(1, [](Session& session) { session.part(); }, 1.0);
      for (int i = 0; i < 5; ++i) {
        got.push_back(&memory.of(5, -1.0F));
        simulation.begin(0, requests.emplace_back(receive(*got.back(), 1)), posted_first ? 0.5 : 1.5);
      }
      EXPECT(!simulation.run().deadlock);
      for (int i = 0; i < 5; ++i) {
        EXPECT(succeeded(requests[static_cast<std::size_t>(i)]));
        EXPECT_EQ((*got[static_cast<std::size_t>(i)])[0], static_cast<float>(i));
      }
    }
  }
}

TEST("a receive of more than a closed peer has sent fails at once, whenever it is posted") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const double posted_s : {0.5, 1.5}) {
      Simulation simulation(3, unruly(seed, {}, true));
      Memory memory;
      std::vector<RequestPtr> requests;
      simulation.begin(1, send(memory.of(5, 1.0F), 0), 1.0);
      simulation.act(1, [](Session& session) { session.part(); }, 1.0);
      for (int i = 0; i < 2; ++i) simulation.begin(0, requests.emplace_back(receive(memory.of(5, 0.0F), 1)), posted_s);
      EXPECT(simulation.run().finish_s < 2.0);
      EXPECT(succeeded(requests[0]));
      REQUIRE(requests[1]->failure());
      EXPECT_EQ(requests[1]->failure()->kind, FailureKind::peer_failed);
      EXPECT_EQ(requests[1]->failure()->peer, 1);
      EXPECT(requests[1]->failure()->reason.find("closed its communicator without sending what rank 0 waits for in "
                                                 "recv(count=5") != std::string::npos);
    }
  }
}

TEST("a send to a peer that has closed fails at once; what came too late to be received keeps no sender waiting") {
  Simulation simulation(2, unruly(1, {}, true));
  Memory memory;
  const auto early = send(memory.of(5, 1.0F), 1);
  const auto late = send(memory.of(5, 1.0F), 1);
  simulation.begin(0, early, 0.5);
  simulation.act(1, [](Session& session) { session.part(); }, 1.0);
  simulation.begin(0, late, 1.5);
  EXPECT(simulation.run().finish_s < 2.0);
  EXPECT(succeeded(early));
  REQUIRE(late->failure());
  EXPECT_EQ(late->failure()->kind, FailureKind::peer_failed);
  EXPECT_EQ(late->failure()->peer, 1);
}

TEST("in one process a send that a closing rank has not looked at fails when that rank has gone") {
  const auto network = std::make_shared<LocalNetwork>(2);
  LocalDriver one(network, 0);
  LocalDriver other(network, 1);
  Session staying(one, {.agreement_s = 0.0});
  Session leaving(other, {.agreement_s = 0.0});
  Memory memory;
  const auto sent = send(memory.of(5, 1.0F), 1);
  staying.begin(sent, 0.0);
  leaving.part();
  other.shut_down();
  while (one.progress() || staying.run_ready()) {
  }
  REQUIRE(sent->failure());
  EXPECT_EQ(sent->failure()->kind, FailureKind::peer_failed);
  EXPECT_EQ(sent->failure()->peer, 1);
  one.shut_down();
  staying.release_quarantine();
}

TEST("a message that arrives twice, or from a future that cannot be, is damage") {
  for (const SimDamage damage : {SimDamage::duplicated, SimDamage::far_sequence}) {
    auto options = unruly(3, {}, true);
    options.faults = {{.kind = SimFaultKind::damage, .rank = 1, .nth = 0, .damage = damage}};
    Simulation simulation(2, options);
    Memory memory;
    simulation.begin(1, send(memory.of(5, 1.0F), 0), 1.0);
    simulation.begin(0, receive(memory.of(5, 1.0F), 1), 1.0);
    const auto more = receive(memory.of(5, 1.0F), 1);
    simulation.begin(0, more, 1.0);
    EXPECT(!simulation.run().deadlock);
    REQUIRE(more->failure());
    EXPECT_EQ(more->failure()->kind, FailureKind::transport);
    EXPECT(more->failure()->reason.find(damage == SimDamage::duplicated ? "arrived twice" : "long before its turn") !=
           std::string::npos);
  }
}

TEST("a report tells the messages that a rank waits for or that wait to be taken") {
  Simulation simulation(3, unruly(1));
  Memory memory;
  simulation.begin_all([](Rank) { return barrier_request(); });
  simulation.begin(0, receive(memory.of(5, 0.0F), 2, 7));
  simulation.begin(0, send(memory.of(6, 0.0F), 1, 8));
  EXPECT(simulation.run().deadlock);
  const SessionReport report = simulation.session(0).report(simulation.now_s());
  REQUIRE(report.messages.size() == 2);
  EXPECT_EQ(describe(report.messages[0].call), std::string("recv(count=5, dtype=f32, source=2, tag=7)"));
  EXPECT_EQ(describe(report.messages[1].call), std::string("send(count=6, dtype=f32, to=1, tag=8)"));
  EXPECT_EQ(report.messages[0].before, 1);
  EXPECT_EQ(report.operations.size(), 1);
  const std::string json = to_json(report, {.why = "asked", .driver = "sim", .host = ""});
  EXPECT(json.find("\"operation\": \"recv\", \"peer\": 2, \"message_tag\": 7, \"before\": 1, \"state\": \"running\"") !=
         std::string::npos);
}

}  // namespace
