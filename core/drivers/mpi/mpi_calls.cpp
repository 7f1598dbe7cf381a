#include "drivers/mpi/mpi_calls.hpp"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "base/leave_signal.hpp"

namespace telegrad {
namespace {

constexpr auto kPause = std::chrono::milliseconds(100);
constexpr int kPauses = 20;  // that one call goes on

std::atomic<bool> mpi_is_lost = false;
thread_local MpiCalls* under_way = nullptr;

pid_t this_thread() {
  thread_local const auto thread = static_cast<pid_t>(::syscall(SYS_gettid));
  return thread;
}

}  // namespace

// A signal that comes late finds another call, or none, and does nothing.
void leave_call(int) {
  MpiCalls* const calls = under_way;
  if (calls == nullptr) return;
  const std::uint64_t number = calls->number_;
  if (number % 2 != 0 && number == calls->leaves_) siglongjmp(calls->way_out_, 1);
}

// Looks for calls that go on and on. Its thread ends with the process.
class StuckCalls {
 public:
  static StuckCalls& of_this_process() {
    static auto* const all = new StuckCalls;
    return *all;
  }

  void add(MpiCalls* calls) {
    const std::scoped_lock lock(mutex_);
    every_.push_back(calls);
  }

  void remove(MpiCalls* calls) {
    const std::scoped_lock lock(mutex_);
    std::erase(every_, calls);
  }

  void watch(int descriptor) {
    change([&] { deaths_.push_back(descriptor); });
  }

  void forget(int descriptor) {
    change([&] { std::erase(deaths_, descriptor); });
  }

  void suspect() {
    change([&] { is_suspect_ = true; });
  }

 private:
  StuckCalls() : bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  void look_for_ever() {
    sigset_t every_signal;
    ::sigfillset(&every_signal);
    ::pthread_sigmask(SIG_BLOCK, &every_signal, nullptr);
    std::vector<pollfd> descriptors;
    while (true) {
      bool is_suspect = false;
      descriptors.assign(1, {.fd = bell_, .events = POLLIN, .revents = 0});
      {
        const std::scoped_lock lock(mutex_);
        for (const int one : deaths_) descriptors.push_back({.fd = one, .events = POLLIN, .revents = 0});
        is_suspect = is_suspect_ && !deaths_.empty();
      }
      if (::poll(descriptors.data(), descriptors.size(), is_suspect ? 0 : -1) < 0) continue;
      std::uint64_t rung = 0;
      [[maybe_unused]] const auto taken = ::read(bell_, &rung, sizeof rung);
      {
        const std::scoped_lock lock(mutex_);
        is_suspect_ |= std::any_of(descriptors.begin() + 1, descriptors.end(), [](const pollfd& one) { return one.revents; });
        for (MpiCalls* const calls : every_) {
          if (is_suspect_) look_at(*calls);
        }
      }
      std::this_thread::sleep_for(kPause);
    }
  }

  template <class Change>
  void change(const Change& act) {
    const std::scoped_lock lock(mutex_);
    act();
    if (!started_ && bell_ >= 0) std::thread([this] { look_for_ever(); }).detach();
    started_ = true;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(bell_, &one, sizeof one);
  }

  static void look_at(MpiCalls& calls) {
    const std::uint64_t number = calls.number_;
    calls.times_seen_ = number == calls.seen_ ? calls.times_seen_ + 1 : 0;
    calls.seen_ = number;
    if (number % 2 != 0 && calls.times_seen_ >= kPauses) leave(calls, number);
  }

  static void leave(MpiCalls& calls, std::uint64_t number) {
    struct sigaction action {};
    action.sa_handler = &leave_call;
    action.sa_flags = SA_NODEFER | SA_RESTART;  // the handler does not return: the signal must not stay blocked
    ::sigemptyset(&action.sa_mask);
    ::sigaction(leave_signal(), &action, nullptr);
    calls.leaves_ = number;
    ::syscall(SYS_tgkill, ::getpid(), calls.thread_.load(), leave_signal());
  }

  std::mutex mutex_;
  std::vector<MpiCalls*> every_;
  std::vector<int> deaths_;  // readable once a rank has ended
  bool is_suspect_ = false;  // some rank has: all calls share what it left
  bool started_ = false;
  const int bell_;
};

MpiCalls::MpiCalls() { StuckCalls::of_this_process().add(this); }

MpiCalls::~MpiCalls() { StuckCalls::of_this_process().remove(this); }

void MpiCalls::watch(int descriptor) {
  if (descriptor >= 0) StuckCalls::of_this_process().watch(descriptor);
}

void MpiCalls::forget(int descriptor) {
  if (descriptor >= 0) StuckCalls::of_this_process().forget(descriptor);
}

void MpiCalls::rank_has_ended() { StuckCalls::of_this_process().suspect(); }

bool MpiCalls::lost() { return mpi_is_lost.load(std::memory_order_relaxed); }

void MpiCalls::begin() {
  thread_.store(this_thread(), std::memory_order_relaxed);
  under_way = this;
  number_.store(number_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

void MpiCalls::end() {
  number_.store(number_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  under_way = nullptr;
}

int MpiCalls::left() {
  end();
  mpi_is_lost = true;
  return kLeft;
}

}  // namespace telegrad
