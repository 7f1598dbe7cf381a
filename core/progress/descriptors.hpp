#pragma once
// How the engine's threads wake each other, and for how long they sleep on descriptors.

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <span>

#include "progress/engine.hpp"

namespace telegrad {

inline void ring(int event) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(event, &one, sizeof one);
}

inline void hush(int event) {
  std::uint64_t count = 0;
  [[maybe_unused]] const auto read = ::read(event, &count, sizeof count);
}

inline int milliseconds_until(double deadline_s, double most_s) {
  const double left = std::clamp(deadline_s - Engine::now_s(), 0.0, most_s);
  return static_cast<int>(std::ceil(left * 1e3));
}

// For less than a second, in finer steps than milliseconds.
inline int poll_briefly(std::span<pollfd> descriptors, double most_s) {
  const timespec most{.tv_sec = 0, .tv_nsec = static_cast<long>(most_s * 1e9)};
  return ::ppoll(descriptors.data(), descriptors.size(), &most, nullptr);
}

}  // namespace telegrad
