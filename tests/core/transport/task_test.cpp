// Task and when_all: order, depth, exceptions, and frames that go while they are suspended.
#include "testing.hpp"

#include <coroutine>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "transport/task.hpp"

namespace {

using telegrad::Task;
using telegrad::take_thrown;
using telegrad::when_all;

// Symmetric transfer is a tail call only in optimised code without sanitizers; elsewhere it uses stack.
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
constexpr int kMany = 1'000'000;
#else
constexpr int kMany = 5'000;
#endif

// Suspends whoever awaits it until open() is called.
struct Gate {
  std::coroutine_handle<> waiter;
  struct Awaiter {
    Gate* gate;
    bool await_ready() const noexcept { return false; }
    void await_suspend(std::coroutine_handle<> handle) const noexcept { gate->waiter = handle; }
    void await_resume() const noexcept {}
  };
  Awaiter operator co_await() { return {this}; }
  void open() { std::exchange(waiter, {}).resume(); }
};

struct Alive {
  explicit Alive(int& count) : count_(&count) { ++*count_; }
  Alive(const Alive&) = delete;
  Alive& operator=(const Alive&) = delete;
  ~Alive() { --*count_; }
  int* count_;
};

Task<int> answer() { co_return 42; }

Task<int> depth(int levels) {
  if (levels == 0) co_return 0;
  co_return 1 + co_await depth(levels - 1);
}

Task<int> loop(int rounds) {
  int sum = 0;
  for (int i = 0; i < rounds; ++i) sum += co_await answer();
  co_return sum;
}

Task<void> pass(Gate& gate, std::string& log, char name) {
  log += name;
  co_await gate;
  log += static_cast<char>(name - 'a' + 'A');
}

Task<void> fail(const char* what) {
  throw std::runtime_error(what);
  co_return;
}

Task<void> fail_after(Gate& gate, const char* what) {
  co_await gate;
  throw std::runtime_error(what);
}

Task<void> hold(Gate& gate, int& alive) {
  const Alive here(alive);
  co_await gate;
}

Task<void> hold_below(Gate& gate, int& alive, int levels) {
  const Alive here(alive);
  if (levels > 0) {
    co_await hold_below(gate, alive, levels - 1);
  } else {
    co_await gate;
  }
}

template <class... Tasks>
std::vector<Task<void>> list(Tasks... tasks) {
  std::vector<Task<void>> all;
  (all.push_back(std::move(tasks)), ...);
  return all;
}

TEST("a task does nothing until it is started, and gives its value") {
  Task<int> task = answer();
  EXPECT(!task.done());
  task.start();
  EXPECT(task.done());
  EXPECT_EQ(task.take(), 42);
}

TEST("a task gives a value that can only be moved") {
  const auto make = []() -> Task<std::unique_ptr<int>> { co_return std::make_unique<int>(7); };
  auto task = make();
  task.start();
  EXPECT_EQ(*task.take(), 7);
}

// Both would overflow the stack if a resumed task returned to whoever resumed it.
TEST("any number of awaited tasks, one after another, use constant stack") {
  auto task = loop(kMany);
  task.start();
  EXPECT_EQ(task.take(), 42 * kMany);
}

TEST("a chain of tasks returns through every level") {
  auto task = depth(kMany / 10);
  task.start();
  EXPECT_EQ(task.take(), kMany / 10);
}

TEST("when_all of nothing is over at once") {
  auto task = when_all({});
  task.start();
  EXPECT(task.done());
}

TEST("when_all starts its tasks in order and ends with the last") {
  Gate first;
  Gate second;
  std::string log;
  auto task = when_all(list(pass(first, log, 'a'), pass(second, log, 'b')));
  task.start();
  EXPECT_EQ(log, "ab");
  second.open();
  EXPECT_EQ(log, "abB");
  EXPECT(!task.done());
  first.open();
  EXPECT_EQ(log, "abBA");
  EXPECT(task.done());
}

TEST("an exception passes through every awaiting task") {
  const auto outer = [](int levels, const auto& self) -> Task<void> {
    if (levels == 0) {
      co_await fail("deep");
    } else {
      co_await self(levels - 1, self);
    }
  };
  auto task = outer(100, outer);
  task.start();
  EXPECT(task.done());
  EXPECT_THROWS(std::runtime_error, "deep", task.take());
}

TEST("when_all waits for all, then throws the first exception in argument order") {
  Gate gate;
  auto task = when_all(list(fail_after(gate, "late but first"), fail("early")));
  task.start();
  EXPECT(!task.done());
  gate.open();
  EXPECT(task.done());
  EXPECT_THROWS(std::runtime_error, "late but first", task.take());
}

TEST("who runs tasks learns what one of them has thrown while others are not over") {
  take_thrown();
  std::string log;
  Gate gate;
  auto task = when_all(list(fail("first"), pass(gate, log, 'a')));
  task.start();
  EXPECT(!task.done());
  EXPECT(take_thrown() != nullptr);
  EXPECT(take_thrown() == nullptr);
  gate.open();
  EXPECT_THROWS(std::runtime_error, "first", task.take());
}

TEST("a suspended task takes with it all frames that it waits for") {
  int alive = 0;
  Gate gate;
  {
    auto task = hold_below(gate, alive, 50);
    task.start();
    EXPECT_EQ(alive, 51);
  }
  EXPECT_EQ(alive, 0);
}

TEST("a suspended when_all takes its children with it, finished or not") {
  int alive = 0;
  Gate never;
  Gate opened;
  {
    auto task = when_all(list(hold(never, alive), hold(opened, alive), hold_below(never, alive, 3)));
    task.start();
    EXPECT_EQ(alive, 6);
    opened.open();
    EXPECT_EQ(alive, 5);
  }
  EXPECT_EQ(alive, 0);
}

TEST("a task that was never started can go") {
  int alive = 0;
  Gate gate;
  { const auto task = hold(gate, alive); }
  EXPECT_EQ(alive, 0);
}

TEST("a root task tells its continuation when it is over") {
  Gate gate;
  std::string log;
  auto task = pass(gate, log, 'a');
  Gate over;
  const auto watch = [](Gate& at_end, std::string& text) -> Task<void> {
    co_await at_end;
    text += '.';
  };
  auto watcher = watch(over, log);
  watcher.start();
  task.continue_with(std::exchange(over.waiter, {}));
  task.start();
  gate.open();
  EXPECT_EQ(log, "aA.");
  EXPECT(watcher.done());
}

}  // namespace
