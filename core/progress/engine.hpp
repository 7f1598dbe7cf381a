#pragma once
// Engine: makes operations advance. One thread per process runs all Sessions; a caller that blocks takes the baton and
// runs them itself, which saves two thread switches. Whoever holds the baton yields for a moment when nothing happens,
// then blocks on the drivers' descriptors: nothing here spins, so ranks may outnumber cores.
// It must not know what an operation does, and throws nothing across threads.

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "progress/promptness.hpp"
#include "session/session.hpp"
#include "transport/driver.hpp"

namespace telegrad {

/// A rank of this process: its network and its protocol.
struct Participant {
  std::unique_ptr<Driver> driver;
  std::unique_ptr<Session> session;
  std::function<void()> write_report;  // may be empty
};

class Engine {
 public:
  /// The process's engine; made with its first user and gone with its last. Throws std::system_error.
  static std::shared_ptr<Engine> shared();
  /// The threads of engines that shared() makes from now on stay on this core; -1: they run where the kernel likes.
  static void set_core(int core);

  Engine();
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void add(Participant& participant);
  void remove(Participant& participant);

  /// Hands an operation over; from any thread, in an order that all ranks share. `caller_waits`: wait_until() follows
  /// at once, so the engine's thread is not woken for it.
  void submit(Participant& participant, RequestPtr request, bool caller_waits);

  /// Makes progress until the request is done or the deadline; true if done. A signal may end it early with false.
  bool wait(const Request& request, double deadline_s);
  /// The same for any condition that is asked with the baton held, by whichever thread holds it: it must throw nothing.
  bool wait_until(const std::function<bool()>& over, double deadline_s);
  /// Runs `action` with the baton held.
  void with_baton(const std::function<void()>& action);

  /// Every participant writes its report soon. Async-signal-safe.
  void ask_for_reports();

  static double now_s();
  /// True in a process that was forked from the one that made this engine: its thread does not exist there.
  bool forked() const;

 private:
  struct Command {
    Participant* participant;
    RequestPtr request;
    Command* next = nullptr;
  };
  enum class Claim : std::uint8_t { action, wait };
  // What a caller waits for while another thread holds the baton, which finds out for it: the other may well wait for
  // what this caller will do next.
  struct Condition {
    const std::function<bool()>* over;
    bool met = false;
  };

  void run_on_core(int core);
  void thread_main();
  bool take_baton(Claim claim, Condition* condition, double deadline_s);
  void release_baton();
  struct Releasing;  // the baton, when it goes
  bool drive(const std::function<bool()>& over, double deadline_s);
  void tell_others();
  bool turn(double now_s);
  bool turn(Participant& participant, double now_s);
  bool run_commands(double now_s);
  bool arm();
  void watch(bool on);
  double next_deadline_s() const;
  bool gates_are_shut() const;
  double pause_for_gates_s();
  void glance(double most_s);
  void set_alarm(double now_s, double delay_s);
  void sleep_as_thread();
  bool work_is_left() const;
  bool sleep_as_caller(double deadline_s);

  std::vector<Participant*> participants_;  // baton
  std::atomic<Command*> commands_ = nullptr;

  std::mutex mutex_;
  std::condition_variable baton_free_;
  bool driving_ = false;   // mutex_: somebody holds the baton
  std::atomic<bool> left_behind_ = false;  // mutex_, to write: by a caller, for the thread to go on with
  std::uint64_t turns_taken_ = 0;  // mutex_: by callers
  std::vector<Condition*> conditions_;  // mutex_
  std::atomic<bool> conditions_fresh_ = false;  // there are some that nobody has asked yet
  double last_release_s_ = 0.0;  // baton
  double gate_pause_s_ = 0.0;  // baton: between looks at gates, while none opens
  bool watching_ = false;  // baton: drivers' descriptors are in epoll_
  std::atomic<int> callers_ = 0;
  std::atomic<int> actions_ = 0;  // with_baton() calls that wait: they go before callers that wait for operations
  std::atomic<bool> stopping_ = false;
  std::atomic<bool> reports_wanted_ = false;
  std::atomic<bool> thread_asleep_ = false;
  std::atomic<bool> looks_soon_ = false;  // the thread sleeps between two looks at gates, and then runs commands too
  std::atomic<bool> glancing_ = false;  // the thread is, because callers drive: it looks again soon
  std::atomic<bool> caller_drives_ = false;
  Promptness promptness_;
  std::atomic<double> alarm_s_ = 0.0;      // when the alarm rings that was set last
  std::atomic<bool> caller_asleep_ = false;

  int epoll_ = -1;
  int thread_event_ = -1;
  int caller_event_ = -1;
  int alarm_ = -1;
  int process_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace telegrad
