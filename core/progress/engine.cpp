#include "progress/engine.hpp"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>

#include "base/check.hpp"
#include "base/ending.hpp"
#include "progress/descriptors.hpp"
#include "progress/report_signal.hpp"

namespace telegrad {
namespace {

// How long nothing may happen before a caller that holds the baton blocks: it has nothing better to do with its core.
constexpr double kCallerPatience_s = 300e-6;
// How long a caller that is done tries to leave the drivers armed.
constexpr double kArmPatience_s = 2e-3;

// A program that calls one operation after another, each sooner than this after the one before, drives them all itself.
// The engine's thread then stays out of its way (engine_thread.cpp).
constexpr double kSteady_s = 1e-3;

// Nobody tells that a gate has opened. So who would sleep looks again, after pauses that double while none does.
constexpr double kGatePauseLeast_s = 50e-6;
constexpr double kGatePauseMost_s = 500e-6;

// A rank that has no memory to receive with ends all ranks' operations with an error. Where even that takes more than there
// is, it ends its process, which the others hear of.
void give_up(Session& session, const std::exception& thrown) noexcept {
  try {
    session.fail(thrown);
  } catch (const std::exception&) {
    end_process("out of memory");
  }
}

std::atomic<int> core_of_threads = -1;

int checked(int result, const char* call) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), call);
  return result;
}

}  // namespace

double Engine::now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Engine::set_core(int core) { core_of_threads = core; }

std::shared_ptr<Engine> Engine::shared() {
  static std::mutex mutex;
  static std::weak_ptr<Engine> engine;
  const std::scoped_lock lock(mutex);
  auto existing = engine.lock();
  if (existing && !existing->forked()) return existing;
  auto fresh = std::make_shared<Engine>();
  if (const int core = core_of_threads; core >= 0) fresh->run_on_core(core);
  engine = fresh;
  set_reporting_engine(fresh.get());
  return fresh;
}

Engine::Engine() : process_(::getpid()) {
  epoll_ = checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
  thread_event_ = checked(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  caller_event_ = checked(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  alarm_ = checked(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), "timerfd_create");
  for (const int descriptor : {thread_event_, alarm_}) {
    epoll_event event{.events = EPOLLIN, .data = {.fd = descriptor}};
    checked(::epoll_ctl(epoll_, EPOLL_CTL_ADD, descriptor, &event), "epoll_ctl");
  }
  thread_ = std::make_unique<std::thread>([this] { or_end("its own thread cannot go on", [this] { thread_main(); }); });
}

Engine::~Engine() {
  forget_reporting_engine(this);
  if (forked()) {
    // The thread exists only in the parent; neither joining nor detaching it would be defined here.
    [[maybe_unused]] const auto* const leaked = thread_.release();
    return;
  }
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  baton_free_.notify_all();
  ring(thread_event_);
  thread_->join();
  or_end("closing cannot go on", [this] { run_commands(now_s()); });
  for (const int descriptor : {epoll_, thread_event_, caller_event_, alarm_}) ::close(descriptor);
}

void Engine::run_on_core(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<std::size_t>(core), &cores);
  const int error = ::pthread_setaffinity_np(thread_->native_handle(), sizeof cores, &cores);
  if (error != 0) throw std::system_error(error, std::generic_category(), "pthread_setaffinity_np");
}

bool Engine::forked() const { return ::getpid() != process_; }

void Engine::add(Participant& participant) {
  with_baton([&] { participants_.push_back(&participant); });
}

void Engine::remove(Participant& participant) {
  with_baton([&] { std::erase(participants_, &participant); });
}

void Engine::submit(Participant& participant, RequestPtr request, bool caller_waits) {
  auto* const command = new Command{&participant, std::move(request)};
  command->next = commands_.load(std::memory_order_relaxed);
  const Gate* const gate = command->request->gate();
  const bool gated = gate != nullptr;
  const bool is_shut = gated && !gate->is_open();
  while (!commands_.compare_exchange_weak(command->next, command)) {
  }
  if (caller_waits) {
    promptness_.blocked();
    return;
  }
  const double now = now_s();
  const double may_lie_s = gated ? 0.0 : promptness_.submitted(now);
  if (caller_asleep_) {
    ring(caller_event_);
  } else if (is_shut && looks_soon_) {
    // To wake the thread costs the caller more than all else here, and it would find the gate shut.
  } else if (!caller_drives_ && thread_asleep_) {
    if (may_lie_s == 0.0) {
      ring(thread_event_);
    } else {
      set_alarm(now, may_lie_s);
    }
  }
}

// One that rings soon enough is left alone: who submits and waits again and again pays for it once in a while.
void Engine::set_alarm(double now_s, double delay_s) {
  if (now_s < alarm_s_ && alarm_s_ <= now_s + delay_s) return;
  alarm_s_ = now_s + delay_s;
  const itimerspec once{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_nsec = static_cast<long>(delay_s * 1e9)}};
  ::timerfd_settime(alarm_, 0, &once, nullptr);
}

bool Engine::run_commands(double now_s) {
  Command* newest = commands_.exchange(nullptr);
  if (newest == nullptr) return false;
  Command* oldest = nullptr;
  while (newest != nullptr) {
    Command* const next = newest->next;
    newest->next = oldest;
    oldest = newest;
    newest = next;
  }
  while (oldest != nullptr) {
    const std::unique_ptr<Command> command(oldest);
    oldest = command->next;
    Session& session = *command->participant->session;
    try {
      session.begin(command->request, now_s);
    } catch (const std::exception& error) {
      give_up(session, error);
      if (!session.holds(*command->request)) session.begin(command->request, now_s);
    }
  }
  return true;
}

void Engine::ask_for_reports() {
  reports_wanted_ = true;
  ring(thread_event_);
  ring(caller_event_);
}

bool Engine::turn(double now_s) {
  bool active = run_commands(now_s);
  if (reports_wanted_.load(std::memory_order_relaxed) && reports_wanted_.exchange(false)) {
    for (const Participant* const participant : participants_) {
      if (participant->write_report) participant->write_report();
    }
  }
  for (Participant* const participant : participants_) {
    try {
      active |= turn(*participant, now_s);
    } catch (const std::exception& error) {
      give_up(*participant->session, error);
      active = true;
    }
  }
  return active;
}

bool Engine::turn(Participant& participant, double now_s) {
  bool active = false;
  participant.session->on_time(now_s);
  if (participant.session->gates_shut() != 0 && participant.session->open_gates(now_s)) {
    gate_pause_s_ = 0.0;
    active = true;
  }
  active |= participant.driver->progress();
  active |= participant.session->run_ready();
  return active;
}

// All drivers, so that no event can slip in between; false if there is something to do first.
bool Engine::arm() {
  for (Participant* const participant : participants_) {
    if (participant->session->has_ready() || !participant->driver->arm()) return false;
  }
  return commands_.load() == nullptr && !reports_wanted_;
}

void Engine::watch(bool on) {
  if (watching_ == on) return;
  watching_ = on;
  for (Participant* const participant : participants_) {
    const int descriptor = participant->driver->wait_descriptor();
    if (descriptor < 0) continue;
    epoll_event event{.events = EPOLLIN, .data = {.fd = descriptor}};
    ::epoll_ctl(epoll_, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, descriptor, &event);
  }
}

double Engine::next_deadline_s() const {
  double deadline_s = std::numeric_limits<double>::infinity();
  for (const Participant* const participant : participants_) {
    deadline_s = std::min(deadline_s, participant->session->next_deadline_s());
  }
  return deadline_s;
}

bool Engine::gates_are_shut() const {
  return std::ranges::any_of(participants_, [](const auto* one) { return one->session->gates_shut() != 0; });
}

// For whoever is about to sleep, once for each time; 0: as long as it likes.
double Engine::pause_for_gates_s() {
  gate_pause_s_ = gates_are_shut() ? std::clamp(2.0 * gate_pause_s_, kGatePauseLeast_s, kGatePauseMost_s) : 0.0;
  return gate_pause_s_;
}

// False if the condition was met, or the deadline passed, while somebody else held the baton.
bool Engine::take_baton(Claim claim, Condition* condition, double deadline_s) {
  std::unique_lock lock(mutex_);
  ++callers_;
  const auto done = [&] { return condition != nullptr && condition->met; };
  const auto must_wait = [&] { return driving_ || (claim == Claim::wait && actions_ > 0); };
  if (condition != nullptr && must_wait()) {
    conditions_.push_back(condition);
    conditions_fresh_ = true;
  }
  while (must_wait() && !done() && now_s() < deadline_s) {
    if (caller_asleep_) ring(caller_event_);  // to run what we have submitted, or to hand over
    baton_free_.wait_for(lock, std::chrono::milliseconds(milliseconds_until(deadline_s, 60.0)));
  }
  if (condition != nullptr) std::erase(conditions_, condition);
  if (must_wait() || done()) {
    // Whoever drove last counted on us: what is left is the thread's.
    const bool nobody_drives = --callers_ == 0 && !driving_;
    if (nobody_drives) left_behind_ = true;
    lock.unlock();
    baton_free_.notify_all();
    if (nobody_drives) ring(thread_event_);
    return false;
  }
  driving_ = true;
  caller_drives_ = true;
  conditions_fresh_ = !conditions_.empty();  // an action may have met them
  lock.unlock();
  watch(false);
  return true;
}

bool Engine::work_is_left() const {
  return commands_.load() != nullptr || reports_wanted_ ||
         !std::ranges::all_of(participants_, [](const auto* participant) { return participant->session->is_quiet(); });
}

// What is left goes on: the drivers are armed and watched, so that a sleeping engine thread need not be woken to do so.
// Where nothing is left and the next call is expected soon, even that would cost more than the call.
void Engine::release_baton() {
  const bool last = callers_ == 1;
  const bool left = last && work_is_left();
  const double now = now_s();
  const bool steady = now - std::exchange(last_release_s_, now) < kSteady_s;
  bool wake = false;
  if (last && thread_asleep_ && (left || !glancing_)) {
    if (!left && steady) {
      wake = true;  // to glance from now on
    } else {
      bool armed = arm();
      while (!armed && now_s() - now < kArmPatience_s) {
        if (!turn(now_s())) ::sched_yield();
        armed = arm();
      }
      // A peer that was killed while it wrote into shared memory leaves a message that never comes, and cannot be waited
      // for: the thread looks for others.
      if (armed && !gates_are_shut()) {
        watch(true);
      } else {
        wake = true;
      }
    }
  }
  bool others_wait = false;
  {
    const std::scoped_lock lock(mutex_);
    driving_ = false;
    caller_drives_ = false;
    others_wait = --callers_ > 0;
    ++turns_taken_;
    if (left) left_behind_ = true;
    // Another one has left meanwhile, without work of its own, and counted on us.
    if (!others_wait && !last) left_behind_ = wake = true;
  }
  if (others_wait) {
    baton_free_.notify_all();
  } else if (wake || (thread_asleep_ && commands_.load() != nullptr)) {
    ring(thread_event_);
  }
}

struct Engine::Releasing {
  Engine& engine;
  ~Releasing() {
    or_end("a caller cannot hand its operations over", [this] { engine.release_baton(); });
  }
};

void Engine::with_baton(const std::function<void()>& action) {
  ++actions_;
  TELEGRAD_CHECK(take_baton(Claim::action, nullptr, std::numeric_limits<double>::infinity()));
  --actions_;
  const Releasing releasing{*this};
  run_commands(now_s());  // what this thread has submitted comes first
  action();
}

bool Engine::wait(const Request& request, double deadline_s) {
  if (promptness_.is_open()) promptness_.waits(now_s());  // who blocks need not look at the clock
  if (request.done()) return true;
  return wait_until([&] { return request.done(); }, deadline_s);
}

bool Engine::wait_until(const std::function<bool()>& over, double deadline_s) {
  Condition condition{&over};
  return take_baton(Claim::wait, &condition, deadline_s) ? drive(over, deadline_s) : condition.met;
}

void Engine::tell_others() {
  bool anything = false;
  {
    const std::scoped_lock lock(mutex_);
    conditions_fresh_ = false;
    for (Condition* const condition : conditions_) {
      if (condition->met || !(*condition->over)()) continue;
      condition->met = anything = true;
    }
  }
  if (anything) baton_free_.notify_all();
}

bool Engine::drive(const std::function<bool()>& over, double deadline_s) {
  const Releasing releasing{*this};
  bool is_over = over();
  double idle_since_s = now_s();
  while (!is_over) {
    const double now = now_s();
    const bool active = turn(now);
    is_over = over();
    if (is_over || now >= deadline_s || actions_ > 0) break;
    if (active || conditions_fresh_) {
      if (active) idle_since_s = now_s();
      if (callers_ > 1 || conditions_fresh_) tell_others();  // those who came late may have left again
    } else if (now - idle_since_s < kCallerPatience_s) {
      ::sched_yield();
    } else if (arm()) {
      if (callers_ > 1) tell_others();  // of what time alone has ended
      if (sleep_as_caller(std::min(deadline_s, next_deadline_s()))) break;
    }
  }
  return is_over;
}

// Keeps the baton: the drivers' descriptors are ours until something happens. True if a signal came.
bool Engine::sleep_as_caller(double deadline_s) {
  std::vector<pollfd> descriptors{{.fd = caller_event_, .events = POLLIN, .revents = 0}};
  for (const Participant* const participant : participants_) {
    const int descriptor = participant->driver->wait_descriptor();
    if (descriptor >= 0) descriptors.push_back({.fd = descriptor, .events = POLLIN, .revents = 0});
  }
  caller_asleep_ = true;
  bool interrupted = false;
  if (commands_.load() == nullptr && actions_ == 0 && !conditions_fresh_) {
    const double pause_s = pause_for_gates_s();
    const int result = pause_s > 0.0 ? poll_briefly(descriptors, pause_s)
                                     : ::poll(descriptors.data(), descriptors.size(), milliseconds_until(deadline_s, 60.0));
    interrupted = result < 0 && errno == EINTR;
  }
  caller_asleep_ = false;
  hush(caller_event_);
  return interrupted;
}

}  // namespace telegrad
