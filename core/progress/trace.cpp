#include "progress/trace.hpp"

#include <unistd.h>

#include "progress/engine.hpp"

namespace telegrad {

void Trace::watch(Request& request) {
  request.when_done([this, &request, submitted_s = Engine::now_s()] {
    TracedOperation ended{.call = request.call(),
                          .begun = request.begun(),
                          .submitted_s = submitted_s,
                          .ended_s = Engine::now_s(),
                          .failed = request.failure().has_value()};
    // The engine looks at the clock once per turn, perhaps just before this was submitted.
    if (ended.begun) ended.begun->when_s = std::max(ended.begun->when_s, submitted_s);
    const std::scoped_lock lock(mutex_);
    operations_.add(ended);
  });
}

void Trace::waited(const Request& request, double begin_s, double end_s) {
  constexpr double kGapMost_s = 0.01;    // between two goes the caller only looks at signals
  constexpr std::size_t kBackMost = 16;  // other threads may have waited in between
  const auto thread = static_cast<std::uint32_t>(::gettid());
  const std::scoped_lock lock(mutex_);
  for (std::size_t back = 0; back < kBackMost; ++back) {
    Wait* const earlier = waits_.find_last(back);
    if (earlier == nullptr) break;
    if (earlier->thread != thread) continue;
    if (earlier->is_over || earlier->request != &request || begin_s - earlier->end_s > kGapMost_s) break;
    earlier->end_s = end_s;
    earlier->is_over = request.done();
    return;
  }
  Wait wait;
  wait.call = request.call();
  wait.thread = thread;
  wait.begin_s = begin_s;
  wait.end_s = end_s;
  wait.request = &request;
  wait.is_over = request.done();
  waits_.add(wait);
}

Trace::Records Trace::records() const {
  const std::scoped_lock lock(mutex_);
  const std::vector<Wait> waits = waits_.in_order();
  return {.operations = operations_.in_order(),
          .waits = {waits.begin(), waits.end()},
          .operations_dropped = operations_.dropped(),
          .waits_dropped = waits_.dropped()};
}

}  // namespace telegrad
