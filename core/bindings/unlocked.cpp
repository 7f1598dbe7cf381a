#include "bindings/unlocked.hpp"

#include <atomic>
#include <chrono>
#include <thread>

namespace telegrad::bindings {
namespace {

std::atomic<std::thread::id> last_thread{};  // the default one: the interpreter goes on
std::atomic<int> returning = 0;              // threads that have looked at last_thread, or will, and do not hold the lock

[[noreturn]] void stand_still() {
  while (true) std::this_thread::sleep_for(std::chrono::hours(1));
}

}  // namespace

Unlocked::Unlocked() : state_(PyEval_SaveThread()) {}

// Counted before it looks: whoever leaves threads behind has either been seen here, or sees this one.
Unlocked::~Unlocked() {
  ++returning;
  const std::thread::id last = last_thread;
  if (last != std::thread::id{} && last != std::this_thread::get_id()) {
    --returning;
    stand_still();
  }
  PyEval_RestoreThread(state_);
  --returning;
}

void leave_threads_behind() {
  last_thread = std::this_thread::get_id();
  const nb::gil_scoped_release unlocked;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (returning > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace telegrad::bindings
