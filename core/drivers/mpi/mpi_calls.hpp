#pragma once
// Calls of MPI that can be left. An MPI whose processes share memory may wait in there for what a killed process has not
// written any more, and never return: MPICH 5.0 does so in whatever makes progress, if the process is killed between the
// two stores by which it appends a message to a queue. A thread of its own sleeps until a rank has ended. If a call then
// goes on for seconds, it sends the caller a signal, whose handler jumps out of MPI.

#include <setjmp.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>

namespace telegrad {

class MpiCalls {
 public:
  static constexpr int kLeft = -1;  // no code of MPI's

  MpiCalls();
  ~MpiCalls();
  MpiCalls(const MpiCalls&) = delete;
  MpiCalls& operator=(const MpiCalls&) = delete;

  /// Readable once a rank has ended and rank_has_ended() was not called for it yet; until forget().
  static void watch(int descriptor);
  static void forget(int descriptor);
  /// What a rank left in shared memory may be found at any time from now on, in calls for any communicator.
  static void rank_has_ended();

  /// What `call` returns, or kLeft if it was left, then or earlier. One thread at a time. The call's frames must own nothing.
  template <class Call>
  [[gnu::noinline]] int run(const Call& call) {
    if (lost()) return kLeft;
    if (sigsetjmp(way_out_, 0) != 0) return left();
    begin();
    const int code = call();
    end();
    return code;
  }

  /// A call was left: its locks may be held, so that this process must not call MPI any more.
  static bool lost();

 private:
  friend class StuckCalls;
  friend void leave_call(int);
  void begin();
  void end();
  int left();

  std::atomic<std::uint64_t> number_ = 0;  // of the call under way; even: of none
  std::atomic<std::uint64_t> leaves_ = 0;  // the call to leave
  std::atomic<pid_t> thread_ = 0;
  sigjmp_buf way_out_{};
  // of StuckCalls
  std::uint64_t seen_ = 0;
  int times_seen_ = 0;
};

}  // namespace telegrad
