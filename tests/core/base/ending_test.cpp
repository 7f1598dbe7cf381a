// How a process ends that cannot go on: whatever the place, with a line on stderr that says why.
#include "base/ending.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "drivers/local/local_driver.hpp"
#include "progress/communicator.hpp"
#include "session/reductions.hpp"
#include "testing.hpp"
#include "transport/transport.hpp"

using namespace telegrad;

namespace {

std::atomic<bool> memory_is_out = false;

}  // namespace

// Of the whole program, so that memory runs out where a test says so. Inlined, GCC takes them for a mismatched pair.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* const memory = memory_is_out ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

struct End {
  bool aborted = false;
  std::string said;
};

// What becomes of a process that runs `body`.
End end_of(const std::function<void()>& body) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const rlimit none{0, 0};
    ::setrlimit(RLIMIT_CORE, &none);
    ::alarm(60);
    ::dup2(ends[1], STDERR_FILENO);
    try {
      body();
    } catch (...) {
      ::_exit(3);
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  End end;
  char piece[256];
  for (ssize_t count = 0; (count = ::read(ends[0], piece, sizeof piece)) > 0;) {
    end.said.append(piece, static_cast<std::size_t>(count));
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  end.aborted = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
  return end;
}

Dense dense(std::vector<float>& data) {
  const auto bytes = std::as_writable_bytes(std::span(data));
  return {.input = bytes, .output = bytes};
}

bool ends_with_memory(const End& end) {
  return end.aborted && end.said.starts_with("telegrad: ") && end.said.ends_with("out of memory; ending the process\n") &&
         end.said.find('\n') + 1 == end.said.size();
}

// A network that throws where it is told to.
struct Throwing final : LocalDriver {
  using LocalDriver::LocalDriver;
  bool progress() override {
    if (in_progress && out_of_memory_too) memory_is_out = true;
    if (in_progress) throw std::bad_alloc();
    return LocalDriver::progress();
  }
  bool arm() override {
    if (in_arm) throw std::bad_alloc();
    return LocalDriver::arm();
  }
  std::atomic<bool> in_progress = false;
  std::atomic<bool> in_arm = false;
  bool out_of_memory_too = false;
};

struct Pair {
  Pair() {
    const auto network = std::make_shared<LocalNetwork>(2);
    auto driver = std::make_unique<Throwing>(network, 1);
    throwing = driver.get();
    all.push_back(std::make_unique<Communicator>(Engine::shared(), std::make_unique<LocalDriver>(network, 0),
                                                 CommunicatorOptions{}));
    all.push_back(std::make_unique<Communicator>(Engine::shared(), std::move(driver), CommunicatorOptions{}));
    for (auto& communicator : all) communicator->join();
    for (auto& communicator : all) {
      while (!communicator->await_join(Engine::now_s() + 60.0)) {
      }
    }
  }
  Throwing* throwing = nullptr;
  std::vector<std::unique_ptr<Communicator>> all;
};

}  // namespace

TEST("a line says what and why, and is cut where it is too long") {
  const End plain = end_of([] { end_process("the reason"); });
  EXPECT(plain.aborted);
  EXPECT_EQ(plain.said, "telegrad: the reason; ending the process\n");
  const End why = end_of([] { or_end("closing cannot go on", [] { throw std::runtime_error("the cable is cut"); }); });
  EXPECT_EQ(why.said, "telegrad: closing cannot go on: the cable is cut; ending the process\n");
  EXPECT(ends_with_memory(end_of([] { or_end("closing cannot go on", [] { throw std::bad_alloc(); }); })));
  const std::string endless(10000, 'x');
  const End cut = end_of([&] { or_end(endless.c_str(), [&] { throw std::runtime_error(endless); }); });
  EXPECT(cut.aborted);
  EXPECT(cut.said.size() < 256);
  EXPECT(cut.said.ends_with("; ending the process\n"));
}

TEST("a line needs no memory") {
  EXPECT(ends_with_memory(end_of([] {
    or_end("closing cannot go on", [] {
      memory_is_out = true;
      [[maybe_unused]] const std::vector<int> impossible(1000);
    });
  })));
}

TEST("what ends well goes on") {
  bool ran = false;
  or_end("nothing", [&] { ran = true; });
  EXPECT(ran);
}

TEST("memory runs out in a collective with messages under way") {
  EXPECT(end_of([] {
           ReadyQueue ready;
           try {
             const Pending pending(ready);
             throw std::bad_alloc();
           } catch (const std::bad_alloc&) {
           }
         }).said == "telegrad: out of memory in a collective with messages under way; ending the process\n");
}

TEST("memory runs out in the engine's thread, where nobody catches what its network throws") {
  EXPECT(ends_with_memory(end_of([] {
    Pair pair;
    pair.throwing->in_arm = true;
    std::vector<float> data(10, 1.0F);
    // Nobody waits for it: the thread takes it over, and sleeps before the other rank calls.
    pair.all[0]->submit(make_all_reduce(2, dense(data)), false);
    for (;;) ::pause();
  })));
}

TEST("memory runs out as callers hand over what is left, to the thread or in passing") {
  EXPECT(ends_with_memory(end_of([] {
    Pair pair;
    std::vector<float> data(10, 1.0F);
    pair.throwing->in_arm = true;
    const auto left =
        pair.all[0]->submit(make_all_reduce(2, dense(data)), true);
    for (;;) {
      try {
        pair.all[0]->wait(*left, Engine::now_s() + 0.01);
      } catch (const std::bad_alloc&) {  // thrown while it waited: its own program's to handle
      }
    }
  })));
}

TEST("memory runs out, and there is none to say so to the other ranks") {
  EXPECT(ends_with_memory(end_of([] {
    Pair pair;
    pair.throwing->out_of_memory_too = true;
    pair.throwing->in_progress = true;
    std::vector<float> data(10, 1.0F);
    const auto sum =
        pair.all[0]->submit(make_all_reduce(2, dense(data)), true);
    for (;;) pair.all[0]->wait(*sum, Engine::now_s() + 0.01);
  })));
}
