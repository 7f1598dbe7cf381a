// Operations whose memory is not ready yet: they have their number, and their messages may come, but do not begin.
#include <algorithm>

#include "session/job.hpp"

namespace telegrad {
namespace {

// Messages that are received in the order in which they were sent, or taken by receives in the order of those.
bool in_one_queue(const Call& one, const Call& other) {
  if (one.operation != other.operation || one.layout != other.layout) return false;
  if (one.root == other.root) return true;
  return one.operation == Operation::receive && (one.root == kNoRank || other.root == kNoRank);
}

}  // namespace

bool Session::may_start(const Job& job, std::size_t before) const {
  const Gate* const gate = job.request().gate();
  if (gate != nullptr && !gate->is_open()) return false;
  return !job.is_message() || std::none_of(gated_.begin(), gated_.begin() + static_cast<std::ptrdiff_t>(before),
                                           [&](const Job* shut) {
                                             return shut->is_message() && in_one_queue(shut->call(), job.call());
                                           });
}

bool Session::waits_at_gate(Job& job) {
  if (may_start(job, gated_.size())) return false;
  job.shut();
  gated_.push_back(&job);
  return true;
}

bool Session::open_gates(double now_s) {
  now_s_ = std::max(now_s_, now_s);
  bool any = false;
  for (std::size_t at = 0; at < gated_.size();) {
    Job& job = *gated_[at];
    if (!may_start(job, at)) {
      ++at;
      continue;
    }
    gated_.erase(gated_.begin() + static_cast<std::ptrdiff_t>(at));
    any = true;
    job.open(now_s_);
    wake_at(job.next_look_s());
    if (job.is_message()) {
      start_message(job);
    } else {
      start(job);
    }
  }
  return any;
}

}  // namespace telegrad
