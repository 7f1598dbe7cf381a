// The engine's own thread: it makes progress while no caller does, and otherwise keeps out of the callers' way.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <utility>

#include "base/leave_signal.hpp"
#include "progress/descriptors.hpp"
#include "progress/engine.hpp"

namespace telegrad {
namespace {

// How long nothing may happen before it blocks: what it takes is taken from the caller's computation.
constexpr double kThreadPatience_s = 40e-6;
// How often it looks whether callers that call again and again still do.
constexpr double kGlanceLeast_s = 5e-3;
constexpr double kGlanceMost_s = 80e-3;

}  // namespace

void Engine::thread_main() {
  // Signals belong to the program's own threads.
  sigset_t all;
  ::sigfillset(&all);
  ::sigdelset(&all, leave_signal());
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  ::pthread_setname_np(::pthread_self(), "telegrad");

  std::uint64_t turns_seen = 0;
  double glance_s = kGlanceLeast_s;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const bool fresh = std::exchange(turns_seen, turns_taken_) != turns_taken_;
    const bool nothing_to_do = fresh && !left_behind_ && commands_.load() == nullptr;
    if (driving_ || callers_ > 0 || nothing_to_do) {
      glance_s = fresh ? kGlanceLeast_s : std::min(2.0 * glance_s, kGlanceMost_s);
      lock.unlock();
      glance(glance_s);
      lock.lock();
      continue;
    }
    driving_ = true;
    left_behind_ = false;
    lock.unlock();
    double idle_since_s = gate_pause_s_ == 0.0 ? now_s() : 0.0;  // between looks at gates there is no patience
    while (!stopping_ && callers_ == 0) {
      const double now = now_s();
      if (turn(now)) {
        idle_since_s = now_s();
      } else if (now - idle_since_s < kThreadPatience_s) {
        ::sched_yield();
      } else if (arm()) {
        break;
      } else {
        ::sched_yield();
      }
    }
    sleep_as_thread();
    lock.lock();
  }
}

void Engine::glance(double most_s) {
  thread_asleep_ = glancing_ = true;
  if (!stopping_ && (caller_drives_ || (commands_.load() == nullptr && !left_behind_))) {
    epoll_event event{};
    ::epoll_wait(epoll_, &event, 1, static_cast<int>(std::ceil(most_s * 1e3)));
  }
  thread_asleep_ = glancing_ = false;
  hush(thread_event_);
  hush(alarm_);
}

// Gives the baton up for the time that it sleeps: a caller may take it.
void Engine::sleep_as_thread() {
  const double deadline_s = next_deadline_s();
  const double pause_s = pause_for_gates_s();
  const bool asleep = !stopping_ && callers_ == 0;
  if (asleep) {
    watch(true);
    looks_soon_ = pause_s > 0.0;
    thread_asleep_ = true;
  }
  {
    const std::scoped_lock lock(mutex_);
    driving_ = false;
  }
  baton_free_.notify_all();
  if (!asleep) return;
  if (commands_.load() == nullptr) {
    if (pause_s > 0.0) {
      pollfd any{.fd = epoll_, .events = POLLIN, .revents = 0};
      poll_briefly({&any, 1}, pause_s);
    } else {
      epoll_event event{};
      ::epoll_wait(epoll_, &event, 1, milliseconds_until(deadline_s, 60.0));
    }
  }
  thread_asleep_ = looks_soon_ = false;
  hush(thread_event_);
  hush(alarm_);
}

}  // namespace telegrad
