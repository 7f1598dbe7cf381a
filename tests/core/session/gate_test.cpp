// Operations that begin once a word in memory has its value, and write another one when they are over.
#include "session/gate.hpp"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "drivers/local/local_driver.hpp"
#include "progress/communicator.hpp"
#include "session/messages.hpp"
#include "session/moves.hpp"
#include "session/reductions.hpp"
#include "testing.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr double kForever = std::numeric_limits<double>::infinity();

// What a rank keeps for a gated operation: as a stream's, input and output lie apart.
struct Staged {
  explicit Staged(float value, std::size_t count = 10) : input(count, value), output(count, 0.0F) {}

  RequestPtr gated(RequestPtr request, std::uint32_t value = 1) {
    request->set_gate({.ready = &ready,
                       .ready_value = value,
                       .done = &done,
                       .done_value = value,
                       .output = std::as_writable_bytes(std::span(output))});
    return request;
  }
  RequestPtr sum(Rank size, std::uint32_t value = 1) {
    return gated(make_all_reduce(size, {.input = std::as_bytes(std::span(input)),
                                        .output = std::as_writable_bytes(std::span(output))}),
                 value);
  }
  void open(std::uint32_t value = 1) { std::atomic_ref(ready).store(value, std::memory_order_release); }
  bool is_released(std::uint32_t value = 1) { return std::atomic_ref(done).load(std::memory_order_acquire) == value; }
  bool holds(float value) const {
    return std::ranges::all_of(output, [=](float x) { return x == value; });
  }
  bool is_spoilt() const {
    return std::ranges::all_of(output, [](float x) { return std::isnan(x); });
  }

  std::vector<float> input, output;
  std::uint32_t ready = 0;
  std::uint32_t done = 0;
};

void run(LocalRanks& ranks, Rank size, double now_s = 0.0) {
  ranks.run();
  for (bool any = true; any;) {
    any = false;
    for (Rank rank = 0; rank < size; ++rank) any |= ranks.session(rank).open_gates(now_s);
    ranks.run();
  }
}

std::vector<std::unique_ptr<Communicator>> make_local(Rank size) {
  const auto network = std::make_shared<LocalNetwork>(size);
  std::vector<std::unique_ptr<Communicator>> all;
  for (Rank rank = 0; rank < size; ++rank) {
    all.push_back(std::make_unique<Communicator>(Engine::shared(), std::make_unique<LocalDriver>(network, rank),
                                                 CommunicatorOptions{.session = {.liveness_timeout_s = {}}}));
  }
  for (auto& communicator : all) communicator->join();
  for (auto& communicator : all) {
    while (!communicator->await_join(kForever)) {
    }
  }
  return all;
}

void await(Communicator& communicator, const RequestPtr& request) {
  while (!communicator.wait(*request, kForever)) {
  }
}

}  // namespace

TEST("an operation begins on all ranks once each one's gate is open") {
  std::vector<Staged> staged{Staged(1.0F), Staged(2.0F)};
  LocalRanks ranks(2);
  std::vector<RequestPtr> requests;
  for (Rank rank = 0; rank < 2; ++rank) {
    ranks.session(rank).begin(requests.emplace_back(staged[rank].sum(2)), 0.0);
    EXPECT_EQ(ranks.session(rank).gates_shut(), 1U);
  }
  run(ranks, 2);
  staged[0].input.assign(10, 5.0F);
  staged[0].open();
  run(ranks, 2);
  EXPECT_EQ(ranks.session(0).gates_shut(), 0U);
  EXPECT(!requests[0]->done());
  staged[1].open();
  run(ranks, 2);
  for (Rank rank = 0; rank < 2; ++rank) {
    REQUIRE(requests[rank]->done());
    requests[rank]->rethrow();
    EXPECT(staged[rank].is_released());
    EXPECT(staged[rank].holds(7.0F));
  }
}

TEST("gates may open in any order, and other operations go on meanwhile") {
  constexpr std::size_t kFlying = 4;
  std::vector<std::vector<Staged>> staged(2);
  LocalRanks ranks(2);
  std::vector<std::vector<RequestPtr>> requests(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(3, 1.0F));
  std::vector<RequestPtr> plain;
  for (Rank rank = 0; rank < 2; ++rank) {
    for (std::size_t i = 0; i < kFlying; ++i) staged[rank].emplace_back(static_cast<float>(i + 1));
    for (std::size_t i = 0; i < kFlying; ++i) {
      ranks.session(rank).begin(requests[rank].emplace_back(staged[rank][i].sum(2)), 0.0);
    }
    const auto bytes = std::as_writable_bytes(std::span(data[rank]));
    ranks.session(rank).begin(plain.emplace_back(make_all_reduce(2, {.input = bytes, .output = bytes})), 0.0);
  }
  run(ranks, 2);
  for (const auto& request : plain) EXPECT(request->done());
  EXPECT_EQ(data[1][2], 2.0F);
  // Each rank opens them in another order.
  for (const std::size_t i : {2U, 0U, 3U, 1U}) {
    staged[0][i].open();
    staged[1][kFlying - 1 - i].open();
    run(ranks, 2);
  }
  for (Rank rank = 0; rank < 2; ++rank) {
    for (std::size_t i = 0; i < kFlying; ++i) {
      EXPECT(requests[rank][i]->done() && !requests[rank][i]->failure());
      EXPECT(staged[rank][i].holds(2.0F * static_cast<float>(i + 1)));
      EXPECT_EQ(requests[rank][i]->begun()->sequence, i);
    }
  }
}

TEST("words are used again with higher values, which may wrap round") {
  Staged staged(3.0F);
  LocalRanks ranks(1);
  staged.ready = staged.done = 0xFFFF'FFFE;
  for (const std::uint32_t value : {0xFFFF'FFFFU, 0U, 1U}) {
    const RequestPtr request = staged.sum(1, value);
    ranks.session(0).begin(request, 0.0);
    run(ranks, 1);
    EXPECT(!request->done());
    staged.open(value);
    run(ranks, 1);
    EXPECT(request->done());
    EXPECT(staged.is_released(value));
  }
}

TEST("a gate without a ready word is open") {
  Staged staged(3.0F);
  LocalRanks ranks(1);
  const RequestPtr request = staged.sum(1);
  Gate gate = *request->gate();
  gate.ready = nullptr;
  request->set_gate(gate);
  ranks.session(0).begin(request, 0.0);
  EXPECT_EQ(ranks.session(0).gates_shut(), 0U);
  EXPECT(request->done());
  EXPECT(staged.is_released());
}

TEST("messages of one tag keep their order behind a shut gate, others overtake it") {
  Staged first(1.0F);
  LocalRanks ranks(2);
  std::vector<float> second(10, 2.0F), aside(10, 3.0F);
  std::vector<std::vector<float>> got(3, std::vector<float>(10));
  const auto send = [](const std::vector<float>& data, Step tag) {
    return make_send(DType::f32, std::as_bytes(std::span(data)), 1, tag);
  };
  const RequestPtr gated = first.gated(send(first.input, 7));
  const RequestPtr behind = send(second, 7), other = send(aside, 8);
  for (const auto& request : {gated, behind, other}) ranks.session(0).begin(request, 0.0);
  std::vector<RequestPtr> receives;
  for (const Step tag : {7U, 7U, 8U}) {
    const auto into = std::as_writable_bytes(std::span(got[receives.size()]));
    ranks.session(1).begin(receives.emplace_back(make_receive(DType::f32, into, 0, tag)), 0.0);
  }
  run(ranks, 2);
  EXPECT(other->done());
  EXPECT_EQ(got[2][0], 3.0F);
  EXPECT(!receives[0]->done() && !receives[1]->done());
  first.open();
  run(ranks, 2);
  for (const auto& request : receives) EXPECT(request->done() && !request->failure());
  EXPECT_EQ(got[0][0], 1.0F);
  EXPECT_EQ(got[1][0], 2.0F);
}

TEST("a receive waits behind a shut one that may take its message") {
  Staged anybody(0.0F);
  LocalRanks ranks(2);
  std::vector<float> sent(10, 4.0F), next(10, 5.0F), got(10);
  const RequestPtr gated =
      anybody.gated(make_receive(DType::f32, std::as_writable_bytes(std::span(anybody.output)), kNoRank, 0));
  const RequestPtr behind = make_receive(DType::f32, std::as_writable_bytes(std::span(got)), 0, 0);
  for (const auto& request : {gated, behind}) ranks.session(1).begin(request, 0.0);
  for (const auto* data : {&sent, &next}) {
    ranks.session(0).begin(make_send(DType::f32, std::as_bytes(std::span(*data)), 1, 0), 0.0);
  }
  run(ranks, 2);
  EXPECT(!behind->done());
  anybody.open();
  run(ranks, 2);
  EXPECT(gated->done() && behind->done());
  EXPECT(anybody.holds(4.0F));
  EXPECT_EQ(got[0], 5.0F);
}

TEST("time runs from the opening of the gate") {
  Simulation simulation(2, {.session = {.timeout_s = 20.0}});
  Session& session = simulation.session(0);
  Staged staged(1.0F);
  const RequestPtr request = staged.gated(std::make_shared<Request>(
      Call{.operation = Operation::barrier}, [](Transport& net) -> Task<void> {
        std::byte nothing{};
        co_await net.receive(1, 0, {&nothing, 1});
      }));
  session.begin(request, 0.0);
  for (double now_s = 0.0; now_s < 100.0; now_s += 0.5) {
    session.on_time(now_s);
    EXPECT(!session.open_gates(now_s));
  }
  EXPECT(!session.failing());
  staged.open();
  EXPECT(session.open_gates(100.0));
  session.on_time(119.0);
  EXPECT(!session.failing());
  session.on_time(120.5);
  EXPECT(session.failing());
}

TEST("a failure spoils the output, whether the gate was open or not, and releases who waits for it") {
  std::vector<Staged> staged{Staged(1.0F), Staged(2.0F), Staged(3.0F)};
  Staged late(4.0F);
  LocalRanks ranks(2, {.agreement_s = 0.0});
  std::vector<RequestPtr> requests;
  for (Staged& one : staged) ranks.session(0).begin(requests.emplace_back(one.sum(2)), 0.0);
  staged[0].open();
  run(ranks, 2);
  ranks.session(0).on_peer_failed(1, "its process is gone");
  EXPECT_EQ(ranks.session(0).gates_shut(), 0U);
  for (std::size_t i = 0; i < staged.size(); ++i) {
    REQUIRE(requests[i]->done() && requests[i]->failure());
    EXPECT_EQ(requests[i]->failure()->kind, FailureKind::peer_failed);
    EXPECT_EQ(requests[i]->failure()->peer, 1U);
    EXPECT(staged[i].is_spoilt());
    EXPECT(staged[i].is_released());
  }
  const RequestPtr refused = late.sum(2);
  ranks.session(0).begin(refused, 0.0);
  EXPECT(refused->failure() && late.is_spoilt() && late.is_released());
}

TEST("ranks that wait at shut gates in different calls find out") {
  Staged one(1.0F, 10), other(2.0F, 11);
  LocalRanks ranks(2, {.agreement_s = 0.0});
  const RequestPtr a = one.sum(2), b = other.sum(2);
  ranks.session(0).begin(a, 0.0);
  ranks.session(1).begin(b, 0.0);
  one.open();
  run(ranks, 2);
  for (const auto& request : {a, b}) {
    REQUIRE(request->done() && request->failure());
    EXPECT_EQ(request->failure()->kind, FailureKind::mismatched_call);
  }
  EXPECT(one.is_spoilt() && other.is_spoilt() && other.is_released());
}

TEST("the engine finds an open gate by itself, also when it has slept for long") {
  auto all = make_local(2);
  std::vector<Staged> staged{Staged(1.0F), Staged(2.0F)};
  std::vector<RequestPtr> requests;
  for (Rank rank = 0; rank < 2; ++rank) {
    requests.push_back(all[rank]->submit(staged[rank].sum(2), false));
  }
  timespec begin{}, end{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
  const long used_ms = (end.tv_sec - begin.tv_sec) * 1000 + (end.tv_nsec - begin.tv_nsec) / 1'000'000;
  EXPECT(used_ms < 200);  // a spin would take twice that
  for (Staged& one : staged) one.open();
  for (Staged& one : staged) {
    while (!one.is_released()) std::this_thread::yield();
    EXPECT(one.holds(3.0F));
  }
  for (Rank rank = 0; rank < 2; ++rank) EXPECT(requests[rank]->done() && !requests[rank]->failure());
}

TEST("what is called while the engine looks for another gate begins when its own has opened") {
  auto all = make_local(2);
  std::vector<Staged> first{Staged(1.0F), Staged(2.0F)};
  for (Rank rank = 0; rank < 2; ++rank) all[rank]->submit(first[rank].sum(2), false);
  for (int round = 0; round < 50; ++round) {
    std::this_thread::sleep_for(std::chrono::microseconds(100 * round));  // the engine's pauses are of many lengths
    std::vector<Staged> staged{Staged(3.0F), Staged(4.0F)};
    for (Rank rank = 0; rank < 2; ++rank) all[rank]->submit(staged[rank].sum(2), false);
    for (Staged& one : staged) one.open();
    for (Staged& one : staged) {
      while (!one.is_released()) std::this_thread::yield();
      EXPECT(one.holds(7.0F));
    }
    for (Staged& one : first) EXPECT(!one.is_released());
  }
  for (Staged& one : first) one.open();
  for (Staged& one : first) {
    while (!one.is_released()) std::this_thread::yield();
    EXPECT(one.holds(3.0F));
  }
}

TEST("a program that waits for each operation at once does not keep the engine from a gate") {
  auto all = make_local(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(3, 1.0F));
  for (int round = 0; round < 20; ++round) {
    std::vector<Staged> staged{Staged(1.0F), Staged(2.0F)};
    for (int times = 0; times < 5; ++times) {
      std::vector<RequestPtr> plain;
      for (Rank rank = 0; rank < 2; ++rank) {
        const auto bytes = std::as_writable_bytes(std::span(data[rank]));
        plain.push_back(all[rank]->submit(make_all_reduce(2, {.input = bytes, .output = bytes}), false));
      }
      for (Rank rank = 0; rank < 2; ++rank) await(*all[rank], plain[rank]);
    }
    for (Rank rank = 0; rank < 2; ++rank) all[rank]->submit(staged[rank].sum(2), false);
    for (Staged& one : staged) one.open();
    for (Staged& one : staged) {
      while (!one.is_released()) std::this_thread::yield();
      EXPECT(one.holds(3.0F));
    }
  }
}

TEST("a caller that waits for a gated operation drives it") {
  auto all = make_local(2);
  std::vector<Staged> staged{Staged(1.0F), Staged(2.0F)};
  std::vector<RequestPtr> requests;
  for (Rank rank = 0; rank < 2; ++rank) requests.push_back(all[rank]->submit(staged[rank].sum(2), false));
  std::thread stream([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    for (Staged& one : staged) one.open();
  });
  for (Rank rank = 0; rank < 2; ++rank) {
    await(*all[rank], requests[rank]);
    requests[rank]->rethrow();
    EXPECT(staged[rank].holds(3.0F));
  }
  stream.join();
}

TEST("closing with a shut gate ends the operation and lets the stream go on") {
  auto all = make_local(2);
  Staged staged(1.0F);
  const RequestPtr request = all[0]->submit(staged.sum(2), false);
  std::thread other([&] { all[1]->close(); });
  all[0]->close();
  other.join();
  REQUIRE(request->done() && request->failure());
  EXPECT(staged.is_spoilt());
  EXPECT(staged.is_released());
  Staged late(1.0F);
  const RequestPtr refused = all[0]->submit(late.sum(2), false);
  EXPECT(refused->failure() && late.is_spoilt() && late.is_released());
}
