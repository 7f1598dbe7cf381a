#include "drivers/processes/process_watch.hpp"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>

namespace telegrad {

// Without these descriptors a death is still noticed, by the connection that breaks or falls silent.
void ProcessWatch::open() {
  if (epoll_ < 0) epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
}

ProcessWatch::Found ProcessWatch::add(Rank rank, const ProcessIdentity& process) {
  const ProcessIdentity::Watch watch = process.watch_from(self_);
  if (watch.has_ended) return Found::ended;
  if (watch.descriptor < 0) return Found::unwatched;
  epoll_event event{.events = EPOLLIN, .data = {.u64 = rank}};
  if (epoll_ < 0 || ::epoll_ctl(epoll_, EPOLL_CTL_ADD, watch.descriptor, &event) != 0) {
    ::close(watch.descriptor);
    return Found::unwatched;
  }
  watched_.emplace_back(rank, watch.descriptor);
  return Found::watched;
}

bool ProcessWatch::find_ended(std::vector<Rank>& ended) {
  if (epoll_ < 0) return false;
  std::array<epoll_event, 16> events{};
  const int found = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < found; ++i) {
    const auto rank = static_cast<Rank>(events[static_cast<std::size_t>(i)].data.u64);
    const auto watched = std::ranges::find(watched_, rank, &std::pair<Rank, int>::first);
    if (watched == watched_.end()) continue;
    ::epoll_ctl(epoll_, EPOLL_CTL_DEL, watched->second, nullptr);  // a forked child may hold a copy
    ::close(watched->second);
    watched_.erase(watched);
    ended.push_back(rank);
  }
  return found > 0;
}

void ProcessWatch::close() {
  for (const auto& [rank, descriptor] : watched_) ::close(descriptor);
  watched_.clear();
  if (epoll_ >= 0) ::close(std::exchange(epoll_, -1));
}

}  // namespace telegrad
