// The protocol of one rank, whose peers are the test: matching, time-outs, aborts, and messages that come early, twice
// or too long.
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "scripted.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;

// Receives `length` bytes in `step` from rank 1.
RequestPtr receiver(Buffer& into, Step step, Call call = kCall) {
  return request([&into, step](Transport& net) -> Task<void> { co_await net.receive(1, step, into.bytes()); }, call);
}

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

TEST("a failure is told to every peer once, ends all operations, and stays") {
  Scripted rank;
  Buffer a(5);
  Buffer b(5);
  const auto first = receiver(a, 3);
  const auto second = receiver(b, 3);
  rank.session.begin(first, 0.0);
  rank.session.begin(second, 0.0);
  rank.session.fail({.kind = FailureKind::transport, .peer = 2, .reason = "cut"});
  rank.session.fail({.kind = FailureKind::timeout, .peer = 1, .reason = "not the first"});
  for (const auto& ended : {first, second}) {
    REQUIRE(ended->failure());
    EXPECT_EQ(ended->failure()->reason, "cut");
    EXPECT_EQ(ended->failure()->rank, 0);
    EXPECT_EQ(ended->failure()->peer, 2);
  }
  EXPECT_EQ(second->failure()->sequence, 1);
  const auto aborts = rank.driver.of_kind(ControlKind::abort);
  REQUIRE(aborts.size() == 2);
  EXPECT_EQ(aborts[0].second.culprit, 2);
  EXPECT_EQ(aborts[1].first, 2);

  const auto third = receiver(a, 3);
  rank.session.begin(third, 0.0);
  REQUIRE(third->failure());
  EXPECT_EQ(third->failure()->reason, 
            "the communicator failed earlier, in allgather(count=5, dtype=u8, reduction=none, algorithm=auto); close "
            "it. That failure was: cut");
  EXPECT_THROWS(TransportError, "rank 0: allgather(count=5", third->rethrow());

  rank.driver.arrive(1, 0, 3, 5);
  EXPECT_EQ(rank.driver.discarded, 1);
}

TEST("an exception in a collective is that rank's failure") {
  Scripted rank;
  const auto first = request([](Transport& net) -> Task<void> {
    co_await net.send(1, 0, {});
    throw std::runtime_error("out of wits");
  });
  rank.session.begin(first, 0.0);
  rank.turns();
  REQUIRE(first->failure());
  EXPECT_EQ(first->failure()->peer, 0);
  EXPECT(first->failure()->reason.find("out of wits") != std::string::npos);
}

TEST("an exception in one of several tasks ends the operation, whatever the others wait for") {
  Scripted rank;
  Buffer never(5);
  const auto waits = [](Transport& net, Buffer& into) -> Task<void> { co_await net.receive(1, 0, into.bytes()); };
  const auto throws = [](Transport& net) -> Task<void> {
    co_await net.send(2, 1, {});
    throw std::bad_alloc();
  };
  const auto first = request([&](Transport& net) -> Task<void> {
    std::vector<Task<void>> both;
    both.push_back(waits(net, never));
    both.push_back(throws(net));
    co_await when_all(std::move(both));
  });
  rank.session.begin(first, 0.0);
  rank.turns();
  REQUIRE(first->failure());
  EXPECT_EQ(first->failure()->peer, 0);
  EXPECT_EQ(first->failure()->reason, "rank 0 ran out of memory");
}

TEST("fail() ends the operation and its coroutine never goes on") {
  Scripted rank;
  bool went_on = false;
  const auto first = request([&](Transport& net) -> Task<void> {
    co_await net.fail(2, "rank 2 sent nonsense");
    went_on = true;
  });
  rank.session.begin(first, 0.0);
  rank.turns();
  REQUIRE(first->failure());
  EXPECT_EQ(first->failure()->peer, 2);
  EXPECT_EQ(first->failure()->reason, "rank 2 sent nonsense");
  EXPECT(!went_on);
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

TEST("a stopped session ends its operations once all peers have spoken, or after a moment") {
  for (const bool all_speak : {true, false}) {
    ScriptedDriver driver(3);
    Session session(driver, {.agreement_s = 0.05});
    Buffer a(5);
    const auto first = receiver(a, 3);
    session.join(1.0);
    session.begin(first, 1.0);
    driver.sink->on_peer_failed(2, "cut");
    EXPECT(session.failing() && !first->done());
    const auto second = receiver(a, 3);
    session.begin(second, 1.0);
    EXPECT(!second->done());
    if (all_speak) {
      driver.sink->on_control({.kind = ControlKind::abort,
                               .failure = FailureKind::peer_failed,
                               .source = 1,
                               .origin = 1,
                               .culprit = 2,
                               .called = 1});
    } else {
      session.on_time(1.0);
      session.on_time(1.049);
      EXPECT(!first->done());
      EXPECT_NEAR(session.next_deadline_s(), 1.05, 1e-9);
      session.on_time(1.051);
    }
    REQUIRE(first->failure() && second->failure());
    EXPECT_EQ(first->failure()->peer, 2);
    EXPECT(first->failure()->reason.find("cut") != std::string::npos);
    EXPECT(second->failure()->reason.find("failed earlier") != std::string::npos);
  }
}

// Rank 1 gives up in operation 1, after it had finished operation 0; rank 0 is in both.
struct WindingUp {
  WindingUp() {
    session.join(1.0);
    session.begin(first, 1.0);
    session.begin(second, 1.0);
    hear(1, 2);
  }
  void hear(Rank source, std::uint32_t called) {
    driver.sink->on_control({.kind = ControlKind::abort,
                             .failure = FailureKind::transport,
                             .source = source,
                             .origin = 1,
                             .culprit = 1,
                             .sequence = 1,
                             .called = called,
                             .reason = "it has had enough"});
  }
  void expect_failed(const Request& ended) {
    REQUIRE(ended.failure());
    EXPECT_EQ(ended.failure()->peer, 1);
    EXPECT_EQ(ended.failure()->reason, "it has had enough");
  }
  ScriptedDriver driver{3};
  Session session{driver, {.agreement_s = 0.05, .dispute_s = 5.0}};
  Buffer a{5};
  Buffer b{5};
  RequestPtr first = receiver(a, 3);
  RequestPtr second = receiver(b, 3);
};

TEST("what a rank had finished before it gave up is finished by the others before they say that they have stopped") {
  WindingUp rank;
  rank.driver.arrive(1, 1, 3, 5);  // of an operation that ends with the failure
  EXPECT_EQ(rank.driver.discarded, 1);
  EXPECT(rank.session.failing() && !rank.session.failure());
  EXPECT(rank.driver.of_kind(ControlKind::abort).empty());
  rank.session.begin(receiver(rank.b, 4), 1.0);  // nor does what is called now
  EXPECT(rank.driver.of_kind(ControlKind::abort).empty());
  rank.session.on_time(1.0);
  rank.session.on_time(2.0);
  rank.driver.arrive(1, 0, 3, 5);
  while (rank.session.run_ready()) {
  }
  EXPECT(rank.first->done() && !rank.first->failure());
  EXPECT_EQ(static_cast<int>(rank.a.data()[0]), 4);
  const auto aborts = rank.driver.of_kind(ControlKind::abort);
  REQUIRE(aborts.size() == 2);
  EXPECT_EQ(aborts[0].second.culprit, 1);
  EXPECT(!rank.second->done());
  rank.hear(2, 2);
  rank.expect_failed(*rank.second);
}

TEST("a second rank that gives up ends nothing that it had finished") {
  for (const std::uint32_t finished : {1u, 0u}) {
    WindingUp rank;
    rank.driver.sink->on_control({.kind = ControlKind::abort,
                                  .source = 2,
                                  .origin = 2,
                                  .culprit = 2,
                                  .sequence = finished,
                                  .called = 1});
    rank.driver.arrive(1, 0, 3, 5);
    while (rank.session.run_ready()) {
    }
    REQUIRE(rank.first->done());
    EXPECT_EQ(rank.first->failure().has_value(), finished == 0);
    rank.expect_failed(*rank.second);
  }
}

TEST("an operation that a rank has stopped without calling does not keep those waiting who are in it") {
  WindingUp rank;
  rank.hear(2, 0);
  rank.expect_failed(*rank.first);
  rank.expect_failed(*rank.second);
}

TEST("who can finish nothing after a rank has given up says so in the end") {
  WindingUp rank;
  rank.session.on_time(1.0);
  rank.session.on_time(5.99);
  EXPECT(!rank.first->done());
  EXPECT(rank.driver.of_kind(ControlKind::abort).empty());
  rank.session.on_time(6.01);
  EXPECT_EQ(rank.driver.of_kind(ControlKind::abort).size(), 2);
  rank.expect_failed(*rank.first);
}

TEST("who is still in what a rank had finished keeps to its failure when another rank is lost") {
  WindingUp rank;
  rank.driver.sink->on_peer_failed(2, "cut");
  rank.expect_failed(*rank.first);
  EXPECT_EQ(rank.driver.of_kind(ControlKind::abort).front().second.culprit, 1);
}

TEST("who gives up finishes what came before") {
  ScriptedDriver driver(3);
  Session session(driver, {.agreement_s = 0.05});
  Buffer a(5);
  const auto first = receiver(a, 3);
  session.join(1.0);
  session.begin(first, 1.0);
  session.give_up("enough");  // while in it: nothing came before
  EXPECT_EQ(driver.of_kind(ControlKind::abort).size(), 2);
  EXPECT_EQ(driver.of_kind(ControlKind::abort).front().second.sequence, 0);
}

TEST("a process that stood still gives itself up before it looks at what has arrived") {
  Scripted rank;
  Buffer a(5);
  const auto first = receiver(a, 3);
  rank.session.join(0.0);
  rank.session.on_time(0.5);
  rank.session.begin(first, 0.5);
  rank.session.on_time(20.0);
  REQUIRE(first->failure());
  EXPECT_EQ(first->failure()->peer, 0);
  EXPECT(first->failure()->reason.find("stood still") != std::string::npos);
  rank.driver.arrive(1, 0, 3, 5);
  EXPECT_EQ(rank.driver.accepted, 0);
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
