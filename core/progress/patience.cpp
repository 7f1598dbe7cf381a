#include "progress/patience.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <set>

#include "transport/driver.hpp"

namespace telegrad {
namespace {

// Between looks at the kernel's counters; waits that end sooner have none.
constexpr double kLookEvery_s = 15e-6;
constexpr double kLookSoon_s = 5e-6;

// A yield that lets somebody in counts.
long switches_of_this_thread() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
}

bool others_wait() {
  static const int file = ::open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
  static const long cores = ::sysconf(_SC_NPROCESSORS_ONLN);
  char text[64];
  const ssize_t length = ::pread(file, text, sizeof text - 1, 0);
  if (length <= 0) return true;
  text[length] = 0;
  long runnable = 0;
  return std::sscanf(text, "%*s %*s %*s %ld", &runnable) != 1 || runnable > cores;
}

}  // namespace

CoreView kernel_view() { return {.switches = &switches_of_this_thread, .others_wait = &others_wait}; }

void Patience::learn_of(const Driver& driver) {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0) return;
  const PeerIdentity self = driver.identity(driver.rank());
  std::set<std::uint32_t> processes;
  for (Rank rank = 0; rank < driver.size(); ++rank) {
    const PeerIdentity peer = driver.identity(rank);
    if (peer.host == self.host) processes.insert(peer.pid);
  }
  crowded_ = crowded_ || processes.size() > static_cast<std::size_t>(CPU_COUNT(&cores));
}

void Patience::renew(double now_s) {
  since_s_ = now_s;
  looked_s_ = 0.0;
}

bool Patience::is_left(double now_s) {
  return now_s - since_s_ < most_s_ && !(crowded_ && stays_on_core(now_s));
}

bool Patience::stays_on_core(double now_s) {
  if (now_s - std::max(since_s_, looked_s_) < (stayed_ ? kLookSoon_s : kLookEvery_s)) return false;
  const bool first = looked_s_ == 0.0;
  const long before = switches_;
  switches_ = view_.switches();
  looked_s_ = now_s;
  if (first) return false;
  stayed_ = switches_ == before && view_.others_wait();
  return stayed_;
}

}  // namespace telegrad
