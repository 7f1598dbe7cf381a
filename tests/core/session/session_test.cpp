// The protocol of one rank, whose peers are the test: matching, time-outs, and messages that come early, twice
// or too long.
#include <string>
#include <utility>
#include <vector>

#include "scripted.hpp"
#include "session/messages.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;

TEST("messages are matched by sender, operation and step, in whatever order they come") {
  Scripted rank;
  Buffer a(5);
  Buffer b(5);
  const auto first = request([&](Transport& net) -> Task<void> {
    auto later = net.receive(2, 9, b.bytes());
    co_await net.receive(1, 7, a.bytes());
    co_await later;
  });
  rank.session.begin(first, 1.5);
  rank.driver.arrive(2, 0, 9, 5);
  rank.turns();
  EXPECT(!first->done());
  rank.session.on_time(4.0);
  rank.driver.arrive(1, 0, 7, 5);
  rank.turns();
  EXPECT(first->done() && !first->failure());
  EXPECT_EQ(first->begun()->when_s, 1.5);
  EXPECT_EQ(first->ended_s().value(), 4.0);
  EXPECT_EQ(static_cast<int>(a.data()[4]), 8);
  EXPECT_EQ(static_cast<int>(b.data()[0]), 10);
  EXPECT_EQ(rank.session.counters().messages_received, 2);
  EXPECT_EQ(rank.session.counters().bytes_received, 10);
}

TEST("memory of messages that come before their operations is bounded, and given back") {
  constexpr std::size_t kOne = 10'000 + Arrival::kEntry;
  for (const bool point_to_point : {false, true}) {
    Scripted rank(3, {.early_most_bytes = 3 * kOne});
    const auto arrive = [&](std::uint32_t sequence) {
      const Operation operation = point_to_point ? Operation::send : Operation::allreduce;
      rank.driver.arrive(1, sequence, 0, 10'000, {.operation = operation, .dtype = DType::u8, .count = 10'000});
    };
    for (std::uint32_t sequence = 0; sequence < 3; ++sequence) arrive(sequence);
    EXPECT(!rank.session.failing());
    Buffer memory(10'000);
    if (point_to_point) {  // one is taken, so that another has room
      rank.session.begin(make_receive(DType::u8, memory.bytes(), 1, 0), 0.0);
      rank.turns();
      EXPECT_EQ(rank.driver.accepted, 1);
      arrive(3);
      EXPECT(!rank.session.failing());
    }
    arrive(4);
    REQUIRE(rank.session.failure());
    EXPECT_EQ(rank.session.failure()->peer, 1U);
    EXPECT(rank.session.failure()->reason.find("that it has not called yet, the last one of rank 1") != std::string::npos);
    EXPECT_EQ(rank.driver.accepted + rank.driver.discarded, point_to_point ? 5 : 4);
  }
}

TEST("a message that comes before its operation waits for it") {
  Scripted rank;
  rank.driver.arrive(1, 1, 3, 5);
  rank.driver.arrive(1, 0, 3, 5);
  EXPECT_EQ(rank.driver.accepted, 0);
  Buffer a(5);
  Buffer b(5);
  const auto first = receiver(a, 3);
  const auto second = receiver(b, 3);
  rank.session.begin(first, 0.0);
  EXPECT(first->done() && !first->failure());
  EXPECT_EQ(rank.driver.accepted, 1);
  rank.session.begin(second, 0.0);
  EXPECT(second->done() && !second->failure());
}

TEST("an early message of another call is a mismatch as soon as the operation begins") {
  Scripted rank;
  rank.driver.arrive(1, 0, 3, 5, {.operation = Operation::broadcast, .root = 2, .count = 5});
  Buffer a(5);
  const auto first = receiver(a, 3);
  rank.session.begin(first, 0.0);
  REQUIRE(first->failure());
  EXPECT_EQ(first->failure()->kind, FailureKind::mismatched_call);
  EXPECT_EQ(first->failure()->peer, 1);
  EXPECT(first->failure()->reason.find("broadcast(count=5") != std::string::npos);
  EXPECT_EQ(rank.driver.accepted, 0);
  EXPECT_EQ(rank.driver.discarded, 1);
}

TEST("the call is compared also where no receive is posted") {
  Scripted rank;
  Buffer a(5);
  const auto first = receiver(a, 3);
  rank.session.begin(first, 0.0);
  rank.driver.arrive(2, 0, 8, 5, {.operation = Operation::allgather, .count = 6});
  REQUIRE(first->failure());
  EXPECT_EQ(first->failure()->kind, FailureKind::mismatched_call);
  EXPECT_EQ(first->failure()->peer, 2);
}

TEST("a message of another epoch or communicator is dropped") {
  Scripted rank(3, {.epoch = 5, .communicator = 2});
  rank.driver.arrive(1, 0, 3, 5);
  EXPECT_EQ(rank.driver.discarded, 1);
  EXPECT(!rank.session.failure());
}

TEST("a step that arrives twice ends the operation, before or after the first was taken") {
  for (const bool posted : {false, true}) {
    Scripted rank;
    Buffer a(5);
    const auto first = receiver(a, posted ? 3 : 4);
    rank.session.begin(first, 0.0);
    rank.driver.arrive(1, 0, 2, 5);
    rank.driver.arrive(1, 0, 2, 5);
    REQUIRE(first->failure());
    EXPECT(first->failure()->reason.find("step 2 arrived twice") != std::string::npos);
    EXPECT_EQ(first->failure()->peer, 1);
  }
}

TEST("a message of the wrong length ends the operation, and is not written") {
  for (const std::size_t length : {4UL, 6UL}) {
    for (const bool early : {false, true}) {
      Scripted rank;
      Buffer a(5);
      const auto first = receiver(a, 3);
      if (early) rank.driver.arrive(1, 0, 3, length);
      rank.session.begin(first, 0.0);
      if (!early) rank.driver.arrive(1, 0, 3, length);
      REQUIRE(first->failure());
      EXPECT_EQ(first->failure()->kind, FailureKind::transport);
      EXPECT_EQ(first->failure()->peer, 1);
      EXPECT(first->failure()->reason.find(std::to_string(length) + " bytes instead of 5") != std::string::npos);
      EXPECT_EQ(rank.driver.accepted, 0);
      EXPECT_EQ(rank.driver.discarded, 1);
    }
  }
}

TEST("a message of any length up to the most gets a buffer of its length; a longer one ends the operation") {
  for (const std::size_t length : {0UL, 7UL, 8UL, 9UL}) {
    Scripted rank;
    std::size_t received = 99;
    const auto first = request([&](Transport& net) -> Task<void> {
      const Buffer buffer = co_await net.receive_any_size(1, 0, 8);
      received = buffer.size();
    });
    rank.session.begin(first, 0.0);
    rank.driver.arrive(1, 0, 0, length);
    rank.turns();
    EXPECT(first->done());
    EXPECT_EQ(first->failure().has_value(), length > 8);
    EXPECT_EQ(received, length > 8 ? 99 : length);
    if (length > 8) EXPECT(first->failure()->reason.find("9 bytes instead of at most 8") != std::string::npos);
  }
}

TEST("a message for an operation that is over is a mismatch") {
  Scripted rank;
  rank.session.begin(request([](Transport&) -> Task<void> { co_return; }), 0.0);
  rank.driver.arrive(1, 0, 0, 6, {.operation = Operation::allgather, .count = 6});
  REQUIRE(rank.session.failure());
  EXPECT_EQ(rank.session.failure()->kind, FailureKind::mismatched_call);
  EXPECT_EQ(rank.session.failure()->peer, 1);
  EXPECT(rank.session.failure()->reason.find("count=5") != std::string::npos);
  EXPECT(rank.session.failure()->reason.find("count=6") != std::string::npos);
}

TEST("a message from an impossible future is damage") {
  Scripted rank;
  rank.driver.arrive(1, 1U << 19, 0, 5);
  EXPECT(!rank.session.failure());
  rank.driver.arrive(1, 1U << 21, 0, 5);
  REQUIRE(rank.session.failure());
  EXPECT_EQ(rank.session.failure()->kind, FailureKind::transport);
}

TEST("a message of the same call after it is over is damage, not a mismatch") {
  Scripted rank;
  rank.session.begin(request([](Transport&) -> Task<void> { co_return; }), 0.0);
  rank.driver.arrive(1, 0, 0, 5);
  REQUIRE(rank.session.failure());
  EXPECT_EQ(rank.session.failure()->kind, FailureKind::transport);
}

TEST("who waits tells its call, in growing intervals; another one is a mismatch, whenever it is heard") {
  const Call other{.operation = Operation::allgather, .count = 6};
  for (const bool called_before : {true, false}) {
    Scripted rank;
    Buffer a(5);
    const auto first = receiver(a, 3);
    rank.session.join(0.0);
    const Control told{.kind = ControlKind::call, .source = 2, .called = 1, .first_call = 0, .calls = {other}};
    if (!called_before) rank.driver.sink->on_control(told);
    EXPECT(!rank.session.failure());
    rank.session.begin(first, 0.0);
    if (called_before) {
      for (double now_s = 0.0; now_s < 0.5; now_s += 0.01) rank.session.on_time(now_s);
      const auto calls = rank.driver.of_kind(ControlKind::call);
      EXPECT_EQ(calls.size(), 4);  // after 20, 60, 140, 300 ms … to rank 1, which it waits for
      EXPECT_EQ(calls[0].first, 1);
      EXPECT_EQ(calls[0].second.calls.size(), 1);
      rank.driver.sink->on_control({.kind = ControlKind::call, .source = 1, .first_call = 0, .calls = {kCall}});
      EXPECT(!rank.session.failure());
      rank.driver.sink->on_control(told);
    }
    REQUIRE(first->failure());
    EXPECT_EQ(first->failure()->kind, FailureKind::mismatched_call);
    EXPECT_EQ(first->failure()->peer, 2);
  }
}

TEST("nothing begins after the goodbye, and what is left is over before its memory goes") {
  ScriptedDriver driver(3);
  Session session(driver, {});
  Buffer a(5);
  const auto running = receiver(a, 3);
  session.join(0.0);
  session.begin(running, 0.0);
  session.part();
  const auto late = receiver(a, 3);
  session.begin(late, 0.0);
  REQUIRE(late->failure());
  EXPECT(late->failure()->reason.find("closed") != std::string::npos);
  EXPECT(!running->done());
  session.release_quarantine();
  REQUIRE(running->failure());
  EXPECT(running->failure()->reason.find("closed") != std::string::npos);
}

TEST("a peer that closed and then ended is closed in reports, not failed") {
  Scripted rank;
  rank.session.join(0.0);
  rank.driver.sink->on_control({.kind = ControlKind::goodbye, .source = 1});
  rank.driver.sink->on_peer_failed(1, "its process has ended");
  EXPECT_EQ(std::string(rank.session.report(1.0).peers[0].state), "closed");
}

TEST("a report tells the last operations, whom they wait for and what is known of the peers") {
  Scripted rank(3, {.epoch = 0xabc});
  Buffer a(5);
  rank.session.join(0.0);
  rank.session.begin(request([](Transport&) -> Task<void> { co_return; }), 0.0);
  rank.session.begin(receiver(a, 3), 1.0);
  rank.driver.sink->on_control({.kind = ControlKind::heartbeat, .source = 2, .epoch = 0xabc, .called = 7});
  const SessionReport report = rank.session.report(3.0);
  EXPECT_EQ(report.called, 2);
  EXPECT_EQ(report.completed, 1);
  REQUIRE(report.operations.size() == 2);
  EXPECT(report.operations[0].entry.state == OperationState::completed);
  EXPECT(report.operations[1].entry.state == OperationState::running);
  EXPECT_EQ(report.operations[1].waits_for, std::vector<Rank>{1});
  REQUIRE(report.peers.size() == 2);
  EXPECT(!report.peers[0].called);
  EXPECT_EQ(*report.peers[1].called, 7);
  const std::string json = to_json(report, {.why = "asked", .driver = "scripted", .host = "a\"b", .pid = 5});
  EXPECT(json.find("\"communicator\": \"00000abc\"") != std::string::npos);
  EXPECT(json.find("\"waits_for\": [1]") != std::string::npos);
  EXPECT(json.find("\"host\": \"a\\\"b\"") != std::string::npos);
}

TEST("an operation that does not end in timeout_s ends with an error that names whom it waited for") {
  Scripted rank(4, {.timeout_s = 0.5});
  Buffer a(5);
  Buffer b(5);
  const auto first = request([&](Transport& net) -> Task<void> {
    auto one = net.receive(3, 0, a.bytes());
    auto other = net.receive(2, 0, b.bytes());
    co_await one;
    co_await other;
  });
  rank.session.join(10.0);
  rank.session.begin(first, 10.0);
  EXPECT(rank.session.next_deadline_s() <= 10.5);
  rank.session.on_time(10.49);
  EXPECT(!first->done());
  rank.session.on_time(10.51);
  REQUIRE(first->failure());
  EXPECT_EQ(first->failure()->kind, FailureKind::timeout);
  EXPECT_EQ(first->failure()->peer, 2);
  EXPECT(first->failure()->reason.find("ranks 2, 3") != std::string::npos);
}

TEST("an operation that is far ahead of a rank waits for it, and times out with its name") {
  constexpr std::uint32_t kAhead = 1U << 16;
  const auto trivial = [](Transport&) -> Task<void> { co_return; };
  for (const auto& [comes, gated] : {std::pair{true, false}, {true, true}, {false, false}, {false, true}}) {
    Scripted rank(3, {.timeout_s = 5.0});
    rank.session.join(0.0);
    rank.driver.sink->on_control({.kind = ControlKind::heartbeat, .source = 1, .called = 2 * kAhead});
    for (std::uint32_t i = 0; i < kAhead; ++i) {
      const auto early = request(trivial);
      rank.session.begin(early, 0.0);
      REQUIRE(early->done());
    }
    EXPECT(rank.driver.of_kind(ControlKind::heartbeat).size() >= 2);  // to each of the two, how far it is
    std::uint32_t word = 0;
    const auto held = request(trivial);
    if (gated) held->set_gate({.ready = &word, .ready_value = 1});
    rank.session.begin(held, 0.0);
    EXPECT(!held->done());
    EXPECT_EQ(rank.session.gates_shut(), 1);
    word = 1;
    EXPECT(!rank.session.open_gates(1.0));  // from here on the time of what had a gate runs, too
    if (comes) {
      rank.driver.sink->on_control({.kind = ControlKind::heartbeat, .source = 2, .called = 1});
      EXPECT(rank.session.open_gates(2.0));
      EXPECT(held->done() && !held->failure());
      continue;
    }
    const double end_s = gated ? 6.0 : 5.0;
    rank.session.on_time(end_s - 0.1);
    EXPECT(!held->done());
    rank.session.on_time(end_s + 0.1);
    REQUIRE(held->failure());
    EXPECT_EQ(held->failure()->kind, FailureKind::timeout);
    EXPECT_EQ(held->failure()->peer, 2);
    EXPECT(held->failure()->reason.find("rank 2, which is 65536 operations behind") != std::string::npos);
  }
}

TEST("heartbeats go to all peers while the session lives") {
  Scripted rank(3, {.liveness_timeout_s = std::nullopt, .heartbeat_s = 1.0});
  rank.session.join(0.0);
  for (double now_s = 0.25; now_s < 5.1; now_s += 0.25) rank.session.on_time(now_s);
  EXPECT_EQ(rank.driver.of_kind(ControlKind::heartbeat).size(), 2 * 5);
}

TEST("heartbeats go on after a failure, to those that have not failed, until this rank parts") {
  Scripted rank(3, {.liveness_timeout_s = std::nullopt, .heartbeat_s = 1.0, .agreement_s = 0.0});
  rank.session.join(0.0);
  rank.driver.sink->on_peer_failed(2, "its process has ended");
  rank.session.on_time(0.1);
  EXPECT(rank.session.failure().has_value());
  for (int i = 1; i <= 50; ++i) rank.session.on_time(0.1 * i);
  EXPECT_EQ(rank.driver.of_kind(ControlKind::heartbeat).size(), 5u);
  rank.session.part();
  for (int i = 51; i <= 100; ++i) rank.session.on_time(0.1 * i);
  EXPECT_EQ(rank.driver.of_kind(ControlKind::heartbeat).size(), 5u);
}

TEST("a peer that speaks another wire version is refused by name") {
  Scripted rank;
  rank.session.join(0.0);
  rank.driver.sink->on_control({.kind = ControlKind::hello, .source = 2, .wire_version = kWireVersion + 1});
  REQUIRE(rank.session.failure());
  EXPECT_EQ(rank.session.failure()->peer, 2);
  EXPECT(rank.session.failure()->reason.find("wire version") != std::string::npos);
}

TEST("a broken connection is the peer's failure, unless the peer had said goodbye") {
  Scripted rank;
  rank.driver.sink->on_control({.kind = ControlKind::goodbye, .source = 1});
  rank.driver.sink->on_peer_failed(1, "connection reset");
  EXPECT(!rank.session.failure());
  rank.driver.sink->on_peer_failed(2, "connection reset");
  REQUIRE(rank.session.failure());
  EXPECT_EQ(rank.session.failure()->kind, FailureKind::peer_failed);
  EXPECT_EQ(rank.session.failure()->peer, 2);
}

}  // namespace
