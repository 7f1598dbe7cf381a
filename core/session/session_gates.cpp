// Operations that do not begin at once, but have their number, and their messages may come: those whose memory is not ready
// yet, and those that are far ahead of a rank. A rank whose messages leave without an answer, as in a gather, would fill the
// memory of one that does not call: that keeps what has come early.
#include <algorithm>
#include <cmath>

#include "session/running_operation.hpp"

namespace telegrad {
namespace {

// Messages that are received in the order in which they were sent, or taken by receives in the order of those.
bool in_one_queue(const Call& one, const Call& other) {
  if (one.operation != other.operation || one.layout != other.layout) return false;
  if (one.root == other.root) return true;
  return one.operation == Operation::receive && (one.root == kNoRank || other.root == kNoRank);
}

constexpr std::uint32_t kAheadLeast = std::uint32_t{1} << 16;  // operations, from which on one waits
constexpr std::uint32_t kTellEvery = kAheadLeast / 4;
static_assert(kAheadLeast <= kAheadMost / 2);  // by then all have come that were sent before

}  // namespace

// Heartbeats say it too, but where calls follow each other fast they are too rare.
void Session::tell_how_far() {
  if (next_sequence_ % kTellEvery != 0 || !std::isfinite(options_.heartbeat_s) || parting_ || failing()) return;
  broadcast({.kind = ControlKind::heartbeat});
}

// The rank that is furthest behind, if operation `sequence` is to wait for it. Those that it still has to call have begun
// here, so that it needs none that waits.
std::optional<Rank> Session::far_behind(std::uint32_t sequence) {
  if (sequence - called_by_all_ < kAheadLeast || !std::isfinite(options_.heartbeat_s)) return std::nullopt;
  std::optional<Rank> slowest;
  called_by_all_ = sequence;
  for (Rank peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const std::uint32_t called = std::as_const(peers_)[peer].called.value_or(0);
    if (!precedes(called, called_by_all_)) continue;
    called_by_all_ = called;
    slowest = peer;
  }
  return sequence - called_by_all_ < kAheadLeast ? std::nullopt : slowest;
}

bool Session::is_gate_shut(const RunningOperation& running, std::size_t before) const {
  const Gate* const gate = running.request().gate();
  if (gate != nullptr && !gate->is_open()) return true;
  return running.is_message() && std::any_of(gated_.begin(), gated_.begin() + static_cast<std::ptrdiff_t>(before),
                                         [&](const RunningOperation* shut) {
                                           return shut->is_message() && in_one_queue(shut->call(), running.call());
                                         });
}

bool Session::is_far_ahead(const RunningOperation& running) { return !running.is_message() && far_behind(running.sequence()); }

// The time of an operation that waits for a rank runs, that of one whose gate is shut does not.
bool Session::waits_at_gate(RunningOperation& running) {
  const bool shut = is_gate_shut(running, gated_.size());
  // One that follows such an operation waits behind it: the network's own collectives begin in the order of calls.
  const bool behind = !running.is_message() && std::ranges::any_of(gated_, [](const RunningOperation* one) {
    return !one->is_message() && !one->is_shut();
  });
  if (!shut && !behind && !is_far_ahead(running)) return false;
  if (shut) running.shut();
  gated_.push_back(&running);
  return true;
}

bool Session::open_gates(double now_s) {
  now_s_ = std::max(now_s_, now_s);
  bool any = false;
  for (std::size_t at = 0; at < gated_.size();) {
    RunningOperation& running = *gated_[at];
    if (is_gate_shut(running, at)) {
      ++at;
      continue;
    }
    if (running.is_shut()) {
      running.open(now_s_);
      wake_at(running.next_look_s());
    }
    if (is_far_ahead(running)) {
      ++at;
      continue;
    }
    gated_.erase(gated_.begin() + static_cast<std::ptrdiff_t>(at));
    any = true;
    if (running.is_message()) {
      start_message(running);
    } else {
      start(running);
    }
  }
  return any;
}

}  // namespace telegrad
