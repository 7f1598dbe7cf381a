// How a session ends: what it tells its peers, what still goes on, and what its operations end with.
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "scripted.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;

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

// A rank in an operation, which listens to the others before it ends with a failure.
struct Listening {
  Listening() {
    session.join(1.0);
    session.begin(first, 1.0);
  }
  ScriptedDriver driver{3};
  Session session{driver, {.agreement_s = 0.05, .dispute_s = 5.0}};
  Buffer a{5};
  RequestPtr first = receiver(a, 3);
};

TEST("a stopped session ends its operations once all peers have spoken, or after a moment") {
  for (const bool all_speak : {true, false}) {
    Listening rank;
    auto& [driver, session, a, first] = rank;
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
struct WindingUp : Listening {
  WindingUp() {
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
  Buffer b{5};
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

TEST("a message that will not come from who has given up ends nothing that it had finished") {
  WindingUp rank;
  const auto message = receiver(rank.b, 0, {.operation = Operation::receive, .root = 1, .count = 5});
  rank.session.begin(message, 1.0);
  rank.driver.sink->on_control({.kind = ControlKind::goodbye, .source = 1, .called = 2});
  EXPECT(!rank.first->done());
  rank.driver.arrive(1, 0, 3, 5);
  while (rank.session.run_ready()) {
  }
  EXPECT(rank.first->done() && !rank.first->failure());
  rank.hear(2, 2);
  rank.expect_failed(*message);
}

TEST("ranks that differ in what a rank had finished before it gave up are told of that") {
  WindingUp rank;
  rank.driver.arrive(2, 0, 3, 5, {.operation = Operation::barrier});
  const auto aborts = rank.driver.of_kind(ControlKind::abort);
  REQUIRE(aborts.size() == 2);
  EXPECT(aborts[0].second.failure == FailureKind::mismatched_call);
  EXPECT_EQ(aborts[0].second.sequence, 0);
}

TEST("an exception ends what a rank had finished before it gave up") {
  ScriptedDriver driver(3);
  Session session(driver, {.agreement_s = 0.05});
  const Control abort{.kind = ControlKind::abort, .source = 1, .origin = 1, .culprit = 1, .sequence = 1, .called = 1};
  Buffer a(5);
  Buffer never(5);
  const auto waits = [](Transport& net, Buffer& into) -> Task<void> { co_await net.receive(1, 0, into.bytes()); };
  const auto throws = [](Transport& net, Buffer& into) -> Task<void> {
    co_await net.receive(2, 4, into.bytes());
    throw std::bad_alloc();
  };
  const auto first = request([&](Transport& net) -> Task<void> {
    std::vector<Task<void>> both;
    both.push_back(waits(net, never));
    both.push_back(throws(net, a));
    co_await when_all(std::move(both));
  });
  session.join(1.0);
  session.begin(first, 1.0);
  driver.sink->on_control(abort);
  EXPECT(driver.of_kind(ControlKind::abort).empty());
  driver.arrive(2, 0, 4, 5);
  while (session.run_ready()) {
  }
  EXPECT_EQ(driver.of_kind(ControlKind::abort).size(), 2);
  Control too = abort;
  too.source = 2;
  driver.sink->on_control(too);
  REQUIRE(first->failure());
  EXPECT_EQ(first->failure()->peer, 1);
}

TEST("who does not listen to others ends at once when a rank gives up") {
  Scripted rank;
  Buffer a(5);
  const auto first = receiver(a, 3);
  rank.session.begin(first, 0.0);
  rank.driver.sink->on_control(
      {.kind = ControlKind::abort, .source = 1, .origin = 1, .culprit = 1, .sequence = 1, .called = 1});
  REQUIRE(first->failure());
  EXPECT_EQ(first->failure()->peer, 1);
}

TEST("who gives up finishes what came before") {
  Listening rank;
  rank.session.give_up("enough");  // while in it: nothing came before
  EXPECT_EQ(rank.driver.of_kind(ControlKind::abort).size(), 2);
  EXPECT_EQ(rank.driver.of_kind(ControlKind::abort).front().second.sequence, 0);
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

}  // namespace
