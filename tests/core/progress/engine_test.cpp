// The engine and Communicator over the local driver: real threads, blocking and not.
#include "progress/engine.hpp"

#include <sched.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "drivers/local/local_driver.hpp"
#include "progress/communicator.hpp"
#include "progress/completion_queue.hpp"
#include "session/moves.hpp"
#include "session/reductions.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;

constexpr double kForever = std::numeric_limits<double>::infinity();

std::vector<std::unique_ptr<Communicator>> make_local(Rank size, SessionOptions options = {}) {
  const auto network = std::make_shared<LocalNetwork>(size);
  std::vector<std::unique_ptr<Communicator>> all;
  for (Rank rank = 0; rank < size; ++rank) {
    all.push_back(std::make_unique<Communicator>(Engine::shared(), std::make_unique<LocalDriver>(network, rank),
                                                 CommunicatorOptions{.session = options}));
  }
  for (auto& communicator : all) communicator->join();
  for (auto& communicator : all) {
    while (!communicator->await_join(kForever)) {
    }
  }
  return all;
}

Dense dense(std::vector<float>& data) {
  const auto bytes = std::as_writable_bytes(std::span(data));
  return {.input = bytes, .output = bytes};
}

RequestPtr sum(Communicator& communicator, std::vector<float>& data, bool caller_waits) {
  return communicator.submit(make_all_reduce(communicator.size(), dense(data)), caller_waits);
}

void finish(Communicator& communicator, const RequestPtr& request) {
  while (!communicator.wait(*request, kForever)) {
  }
  request->rethrow();
}

}  // namespace

TEST("blocking calls from one thread per rank") {
  for (const Rank size : {1U, 2U, 3U, 8U}) {
    auto all = make_local(size);
    std::vector<std::thread> threads;
    std::vector<std::vector<float>> data(size, std::vector<float>(1000));
    for (Rank rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        for (int round = 0; round < 20; ++round) {
          std::iota(data[rank].begin(), data[rank].end(), static_cast<float>(rank));
          finish(*all[rank], sum(*all[rank], data[rank], true));
        }
      });
    }
    for (auto& thread : threads) thread.join();
    const auto ranks = static_cast<float>(size);
    for (Rank rank = 0; rank < size; ++rank) {
      for (std::size_t i = 0; i < 1000; ++i) {
        EXPECT_EQ(data[rank][i], ranks * static_cast<float>(i) + ranks * (ranks - 1) / 2);
      }
    }
  }
}

TEST("many operations in flight from one thread") {
  constexpr Rank kSize = 4;
  constexpr std::size_t kFlying = 32;
  auto all = make_local(kSize);
  std::vector<std::vector<float>> data(kSize * kFlying, std::vector<float>(257, 1.0F));
  std::vector<std::pair<Rank, RequestPtr>> requests;
  for (Rank rank = 0; rank < kSize; ++rank) {
    for (std::size_t i = 0; i < kFlying; ++i) {
      requests.emplace_back(rank, sum(*all[rank], data[rank * kFlying + i], false));
    }
  }
  for (auto& [rank, request] : requests) finish(*all[rank], request);
  for (const auto& vector : data) EXPECT(std::ranges::all_of(vector, [](float x) { return x == 4.0F; }));
}

TEST("the engine's thread finishes what nobody waits for") {
  auto all = make_local(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(10, 1.0F));
  CompletionQueue queue;
  const auto first = sum(*all[0], data[0], false);
  queue.watch(*first, 7);
  EXPECT(!first->done());
  const auto second = sum(*all[1], data[1], false);
  EXPECT_EQ(queue.next(std::chrono::seconds(30)).at(0), 7U);
  EXPECT(first->done());
  finish(*all[1], second);
}

TEST("a wait that runs out of time can be repeated") {
  auto all = make_local(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(10, 1.0F));
  const auto first = sum(*all[0], data[0], true);
  EXPECT(!all[0]->wait(*first, Engine::now_s() + 0.01));
  const auto second = sum(*all[1], data[1], true);
  finish(*all[0], first);
  finish(*all[1], second);
  EXPECT_EQ(data[0][9], 2.0F);
}

TEST("a thread learns that it need not wait while another one waits for what it does next") {
  auto all = make_local(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(10, 1.0F));
  const auto first = sum(*all[0], data[0], true);
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the first thread most likely holds the baton by now
    EXPECT(Engine::shared()->wait_until([] { return true; }, Engine::now_s() + 20.0));
    finish(*all[1], sum(*all[1], data[1], true));
  });
  finish(*all[0], first);
  other.join();
  EXPECT_EQ(data[0][0], 2.0F);
}

TEST("what two threads leave behind is finished, whichever of them leaves last") {
  constexpr double kNever_s = std::numeric_limits<double>::infinity();
  auto all = make_local(2, {.heartbeat_s = kNever_s, .probe_s = kNever_s});  // nothing else wakes the engine's thread
  for (int round = 0; round < 300; ++round) {
    std::vector<std::vector<float>> waited(2, std::vector<float>(10, 1.0F));
    std::vector<std::vector<float>> left(2, std::vector<float>(1000, 1.0F));
    std::vector<RequestPtr> unwaited(2);
    const auto call = [&](Rank rank) {
      const RequestPtr first = sum(*all[rank], waited[rank], true);
      unwaited[rank] = sum(*all[rank], left[rank], true);
      finish(*all[rank], first);
    };
    std::thread other([&] { call(1); });
    call(0);
    other.join();
    const double deadline_s = Engine::now_s() + 20.0;
    while (!(unwaited[0]->done() && unwaited[1]->done()) && Engine::now_s() < deadline_s) std::this_thread::yield();
    EXPECT(unwaited[0]->done());
    EXPECT(unwaited[1]->done());
    if (!unwaited[0]->done() || !unwaited[1]->done()) return;
  }
}

TEST("a thread that gives up waiting does not keep the one busy that goes on") {
  auto all = make_local(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(10, 1.0F));
  const auto first = sum(*all[0], data[0], true);
  long used_ms = 0;
  std::thread waiting([&] {
    timespec begin{}, end{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    finish(*all[0], first);
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    used_ms = (end.tv_sec - begin.tv_sec) * 1000 + (end.tv_nsec - begin.tv_nsec) / 1'000'000;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (int round = 0; round < 50; ++round) {
    EXPECT(!Engine::shared()->wait_until([] { return false; }, Engine::now_s()));
  }
  std::this_thread::sleep_for(std::chrono::seconds(2));
  finish(*all[1], sum(*all[1], data[1], true));
  waiting.join();
  EXPECT(used_ms < 500);  // of the 2 s
}

TEST("ranks that join in threads of one process, each summing as soon as it may") {
  for (int round = 0; round < 100; ++round) {
    const auto network = std::make_shared<LocalNetwork>(3);
    std::vector<std::unique_ptr<LocalDriver>> drivers;
    for (Rank rank = 0; rank < 3; ++rank) drivers.push_back(std::make_unique<LocalDriver>(network, rank));
    std::vector<std::thread> threads;
    for (Rank rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        Communicator communicator(Engine::shared(), std::move(drivers[rank]), {});
        communicator.join();
        const double deadline_s = Engine::now_s() + 60.0;
        bool joined = false;
        while (!joined && Engine::now_s() < deadline_s) joined = communicator.await_join(deadline_s);
        EXPECT(joined);
        std::vector<float> data(10, 1.0F);
        finish(communicator, sum(communicator, data, true));
        EXPECT_EQ(data[9], 3.0F);
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

TEST("a wait ends at its deadline also where the network cannot be waited for") {
  struct NeverArmed final : LocalDriver {
    using LocalDriver::LocalDriver;
    bool arm() override { return false; }
  };
  const auto network = std::make_shared<LocalNetwork>(2);
  std::vector<std::unique_ptr<Communicator>> all;
  for (Rank rank = 0; rank < 2; ++rank) {
    all.push_back(std::make_unique<Communicator>(Engine::shared(), std::make_unique<NeverArmed>(network, rank),
                                                 CommunicatorOptions{}));
  }
  for (auto& communicator : all) communicator->join();
  for (auto& communicator : all) {
    while (!communicator->await_join(kForever)) {
    }
  }
  std::vector<std::vector<float>> data(2, std::vector<float>(10, 1.0F));
  const RequestPtr first = sum(*all[0], data[0], false);
  for (int i = 0; i < 10; ++i) EXPECT(!all[0]->wait(*first, Engine::now_s() + 0.02));
  const RequestPtr second = sum(*all[1], data[1], false);
  finish(*all[0], first);
  finish(*all[1], second);
  EXPECT_EQ(data[0], data[1]);
}

TEST("what a network throws ends the operation on all ranks, and leaves the engine to others") {
  struct Throwing final : LocalDriver {
    using LocalDriver::LocalDriver;
    bool progress() override {
      if (throws) throw std::bad_alloc();
      return LocalDriver::progress();
    }
    std::atomic<bool> throws = false;
  };
  for (const bool caller_waits : {true, false}) {
    const auto network = std::make_shared<LocalNetwork>(2);
    auto driver = std::make_unique<Throwing>(network, 1);
    Throwing& throwing = *driver;
    Communicator one(Engine::shared(), std::make_unique<LocalDriver>(network, 0), {});
    Communicator other(Engine::shared(), std::move(driver), {});
    one.join();
    other.join();
    for (Communicator* communicator : {&one, &other}) {
      while (!communicator->await_join(kForever)) {
      }
    }
    std::vector<std::vector<float>> data(2, std::vector<float>(10, 1.0F));
    const auto first = sum(one, data[0], caller_waits);
    throwing.throws = true;
    while (!one.wait(*first, kForever)) {
    }
    REQUIRE(first->failure());
    EXPECT_EQ(first->failure()->peer, Rank{1});
    EXPECT_EQ(first->failure()->reason, "rank 1 ran out of memory");
    throwing.throws = false;
    auto others = make_local(2);
    const auto second = sum(*others[0], data[0], false);
    finish(*others[1], sum(*others[1], data[1], true));
    finish(*others[0], second);
  }
}

TEST("an action that throws gives the engine back") {
  Engine engine;
  EXPECT_THROWS(std::runtime_error, "no", engine.with_baton([] { throw std::runtime_error("no"); }));
  bool ran = false;
  engine.with_baton([&] { ran = true; });
  EXPECT(ran);
}

TEST("different calls fail on every rank and write nothing") {
  auto all = make_local(3);
  std::vector<std::vector<float>> data(3, std::vector<float>(10, 1.0F));
  data[2].resize(11, 1.0F);
  std::vector<RequestPtr> requests;
  for (Rank rank = 0; rank < 3; ++rank) requests.push_back(sum(*all[rank], data[rank], false));
  for (Rank rank = 0; rank < 3; ++rank) {
    while (!all[rank]->wait(*requests[rank], kForever)) {
    }
    EXPECT(requests[rank]->failure().has_value());
    EXPECT(requests[rank]->failure()->kind == FailureKind::mismatched_call);
    EXPECT_EQ(data[rank][0], 1.0F);
  }
}

TEST("a sum that goes by other means ends once all ranks have called it, and sends no elements") {
  auto all = make_local(3);
  const auto call = [](Communicator& rank, std::uint64_t count) {
    return rank.submit(make_announced_all_reduce(DType::f32, Reduction::avg, count), false);
  };
  std::vector<RequestPtr> requests{call(*all[0], 1000000), call(*all[1], 1000000)};
  EXPECT(!all[0]->wait(*requests[0], Engine::now_s() + 0.05));
  requests.push_back(call(*all[2], 1000000));
  for (std::size_t rank = 0; rank < all.size(); ++rank) finish(*all[rank], requests[rank]);
  for (const auto& rank : all) EXPECT_EQ(rank->counters().bytes_sent, 0U);

  requests = {call(*all[0], 5), call(*all[1], 5), call(*all[2], 6)};
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    EXPECT(all[rank]->wait(*requests[rank], Engine::now_s() + 30));
    EXPECT(requests[rank]->failure()->kind == FailureKind::mismatched_call);
    EXPECT(requests[rank]->failure()->reason.find("allreduce(count=6, dtype=f32, reduction=avg, algorithm=nccl)") !=
           std::string::npos);
  }
}

TEST("an operation that some rank never calls times out and names that rank") {
  auto all = make_local(2, {.timeout_s = 0.05});
  std::vector<float> data(10, 1.0F);
  const auto request = sum(*all[0], data, true);
  while (!all[0]->wait(*request, kForever)) {
  }
  EXPECT(request->failure()->kind == FailureKind::timeout);
  EXPECT_EQ(request->failure()->peer, 1U);
}

TEST("abort reaches operations on other ranks") {
  auto all = make_local(2);
  std::vector<float> data(10, 1.0F);
  const auto request = sum(*all[0], data, true);
  std::thread aborter([&] { all[1]->abort("enough"); });
  while (!all[0]->wait(*request, kForever)) {
  }
  aborter.join();
  EXPECT(request->failure()->reason.find("enough") != std::string::npos);
  EXPECT_EQ(request->failure()->peer, 1U);
}

TEST("closing with an operation under way fails it, and later calls say closed") {
  auto all = make_local(2);
  std::vector<float> data(10, 1.0F);
  const auto request = sum(*all[0], data, false);
  all[0]->close();
  EXPECT(request->done() && request->failure().has_value());
  const auto late = all[0]->submit(make_barrier(), true);
  EXPECT(late->done() && late->failure().has_value());
}

TEST("an operation that a closed peer will never call fails at once and names the peer") {
  for (const bool called_before : {true, false}) {
    auto all = make_local(2);
    std::vector<float> data(10, 1.0F);
    RequestPtr request;
    if (called_before) request = sum(*all[0], data, false);
    all[1]->close();
    if (!called_before) request = sum(*all[0], data, false);
    EXPECT(all[0]->wait(*request, Engine::now_s() + 30));
    EXPECT(request->failure()->kind == FailureKind::peer_failed);
    EXPECT_EQ(request->failure()->peer, 1U);
    EXPECT_EQ(data[0], 1.0F);
  }
}

TEST("an operation that a closed peer has called is finished") {
  auto all = make_local(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(10, 1.0F));
  const auto first = sum(*all[0], data[0], false);
  finish(*all[1], sum(*all[1], data[1], true));
  all[1]->close();
  finish(*all[0], first);
  EXPECT_EQ(data[0][0], 2.0F);
}

TEST("a forked child can exit without its parent's engine") {
  auto all = make_local(2);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool forked = all[0]->forked();
    all.clear();
    ::_exit(forked ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST("counters say what went to whom, what is under way, and how long callers waited") {
  auto all = make_local(3);
  std::vector<std::vector<float>> data(3, std::vector<float>(300, 1.0F));
  std::vector<RequestPtr> requests{sum(*all[0], data[0], false), sum(*all[1], data[1], false)};
  EXPECT_EQ(all[0]->counters().in_flight, 1U);
  EXPECT(!all[0]->wait(*requests[0], Engine::now_s() + 0.02));
  EXPECT(all[0]->counters().waiting_s >= 0.02);
  requests.push_back(sum(*all[2], data[2], false));
  for (Rank rank = 0; rank < 3; ++rank) finish(*all[rank], requests[rank]);
  std::vector<Communicator::Counters> counters;
  for (auto& communicator : all) counters.push_back(communicator->counters());
  all[0]->close();
  counters[0] = all[0]->counters();  // the last ones stay
  for (Rank rank = 0; rank < 3; ++rank) {
    const Communicator::Counters& mine = counters[rank];
    EXPECT_EQ(mine.operations, 1U);
    EXPECT_EQ(mine.in_flight, 0U);
    REQUIRE(mine.peers.size() == 3);
    Session::Traffic total;
    for (Rank peer = 0; peer < 3; ++peer) {
      total.messages_sent += mine.peers[peer].messages_sent;
      total.bytes_sent += mine.peers[peer].bytes_sent;
      EXPECT_EQ(mine.peers[peer].bytes_sent, counters[peer].peers[rank].bytes_received);
      EXPECT_EQ(mine.peers[peer].messages_sent, counters[peer].peers[rank].messages_received);
    }
    EXPECT(total.bytes_sent > 0);
    EXPECT_EQ(total.bytes_sent, mine.bytes_sent);
    EXPECT_EQ(total.messages_sent, mine.messages_sent);
    EXPECT_EQ(mine.peers[rank].messages_sent, 0U);
  }
}

// Of use under ThreadSanitizer above all.
TEST("threads that submit, wait, ask and look at once") {
  constexpr Rank kSize = 3;
  constexpr int kRounds = 200;
  auto all = make_local(kSize);
  for (auto& communicator : all) communicator->start_trace(64);
  std::atomic<bool> over = false;
  std::vector<std::thread> threads;
  for (Rank rank = 0; rank < kSize; ++rank) {
    threads.emplace_back([&, rank] {
      Communicator& own = *all[rank];
      std::vector<std::vector<float>> data(4, std::vector<float>(100));
      for (int round = 0; round < kRounds; ++round) {
        std::vector<RequestPtr> requests;
        for (auto& one : data) {
          one.assign(100, 1.0F);
          requests.push_back(sum(own, one, false));
        }
        std::thread other([&] { finish(own, requests[1]); });
        finish(own, own.submit(make_barrier(), round % 2 == 0));
        for (const auto& request : requests) finish(own, request);
        other.join();
        for (const auto& one : data) EXPECT_EQ(one[99], 3.0F);
      }
    });
  }
  std::thread onlooker([&] {
    while (!over) {
      for (auto& communicator : all) {
        EXPECT(communicator->counters().in_flight <= 5);
        EXPECT(communicator->traced().operations.size() <= 64);
        EXPECT(!communicator->report().empty());
      }
      Engine::shared()->ask_for_reports();
    }
  });
  for (auto& thread : threads) thread.join();
  over = true;
  onlooker.join();
  for (auto& communicator : all) EXPECT_EQ(communicator->counters().operations, 5U * kRounds);
}

TEST("an engine whose thread is to stay on a core does its work there; a core that is not there is refused") {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  ::sched_getaffinity(0, sizeof allowed, &allowed);
  int core = 0;
  while (!CPU_ISSET(static_cast<std::size_t>(core), &allowed)) ++core;
  Engine::set_core(core);
  {
    auto all = make_local(2);
    std::vector<std::vector<float>> data(2, std::vector<float>(10, 1.0F));
    std::promise<int> ran_on;
    const auto first = sum(*all[0], data[0], false);
    first->when_done([&] { ran_on.set_value(::sched_getcpu()); });  // nobody waits: this is the engine's thread
    const auto second = sum(*all[1], data[1], false);
    EXPECT_EQ(ran_on.get_future().get(), core);
    finish(*all[1], second);
  }
  Engine::set_core(CPU_SETSIZE - 1);
  EXPECT_THROWS(std::system_error, "pthread_setaffinity_np", Engine::shared());
  Engine::set_core(-1);
  EXPECT(Engine::shared() != nullptr);
}
