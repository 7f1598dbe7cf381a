// What a session does because time passes: heartbeats, liveness, deadlines; and the control messages it sends.
#include <algorithm>
#include <cstdio>

#include "session/running_operation.hpp"

namespace telegrad {
namespace {

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return std::string(text) + " s";
}

}  // namespace

void Session::send(Rank peer, Control control) {
  control.source = rank();
  control.epoch = options_.epoch;
  control.called = next_sequence_;
  control.messages = point_to_point_.sent_to(peer);
  driver_.send_control(peer, control);
}

void Session::broadcast(const Control& control) {
  for (Rank peer = 0; peer < size(); ++peer) {
    if (peer != rank() && !peers_[peer].failed) send(peer, control);
  }
}

void Session::join(double now_s) {
  now_s_ = last_look_s_ = last_tick_s_ = now_s;
  joining_ = true;
  for (Rank peer = 0; peer < size(); ++peer) peers_[peer].heard_s = now_s;
  next_heartbeat_s_ = now_s + options_.heartbeat_s;
  wake_at(next_heartbeat_s_);
  for (Rank far = 1; far < size(); far *= 2) send((rank() + far) % size(), {.kind = ControlKind::hello});
}

void Session::on_time(double now_s) {
  const double since_s = now_s - std::exchange(last_tick_s_, now_s);
  now_s_ = std::max(now_s_, now_s);
  if (now_s < next_deadline_s_) return;
  next_deadline_s_ = std::numeric_limits<double>::infinity();
  if (failing()) beat_on(now_s);
  if (failure_) return;
  if (failing()) {
    if (listen_s_) listen_until_s_ = std::min(listen_until_s_, now_s + *std::exchange(listen_s_, std::nullopt));
    if (now_s >= listen_until_s_) {
      if (winding_up_) stop_winding_up();  // others are to hear of it, if only now
      if (!failure_) conclude();
    } else {
      wake_at(listen_until_s_);
    }
    return;
  }
  // Whoever runs a session looks at the time at least as often as heartbeats go, unless the whole process stood still.
  const bool beats = next_heartbeat_s_ < std::numeric_limits<double>::infinity();
  if (beats && options_.liveness_timeout_s && since_s > *options_.liveness_timeout_s + options_.heartbeat_s) {
    fail({.kind = FailureKind::peer_failed,
          .peer = rank(),
          .sequence = first_unfinished(),
          .reason = "rank " + std::to_string(rank()) + "'s process stood still for " + seconds(since_s) +
                    ", longer than liveness_timeout_s=" + seconds(*options_.liveness_timeout_s) +
                    ", after which others give it up"});
    return;
  }
  if (now_s >= next_heartbeat_s_) {
    next_heartbeat_s_ = now_s + options_.heartbeat_s;
    if (!parting_) beat();
    check_liveness(now_s);
  }
  if (!failing()) look_at_deadlines(now_s);
  if (!failing() && stalled_) look_for_stalls(now_s);
}

// Ranks that have heard of the failure first go on without those that are silent. One that computes is not.
void Session::beat_on(double now_s) {
  if (now_s >= next_heartbeat_s_) {
    next_heartbeat_s_ = now_s + options_.heartbeat_s;
    if (!parting_) broadcast({.kind = ControlKind::heartbeat});
  }
  wake_at(next_heartbeat_s_);
}

// With its last call, so that who waits for this rank can say what it did.
void Session::beat() {
  Control beat{.kind = ControlKind::heartbeat};
  if (const History::Entry* const last = history_.find(next_sequence_ - 1); last != nullptr) {
    beat.first_call = last->sequence;
    beat.calls = {last->call};
  }
  broadcast(beat);
}

void Session::check_liveness(double now_s) {
  // Time in which this process itself stood still does not count.
  const double unwatched_s = now_s - std::exchange(last_look_s_, now_s) - 2.0 * options_.heartbeat_s;
  for (Rank rank_of_peer = 0; rank_of_peer < size(); ++rank_of_peer) {
    Peer& peer = peers_[rank_of_peer];
    if (rank_of_peer == rank() || peer.parted || peer.failed) continue;
    if (unwatched_s > 0.0) peer.heard_s = std::min(peer.heard_s + unwatched_s, now_s);
    if (!options_.liveness_timeout_s || now_s - peer.heard_s <= *options_.liveness_timeout_s) continue;
    fail({.kind = FailureKind::peer_failed,
          .peer = rank_of_peer,
          .sequence = first_unfinished(),
          .reason = "rank " + std::to_string(rank_of_peer) + " has been silent for more than liveness_timeout_s=" +
                    seconds(*options_.liveness_timeout_s) + ": its process is frozen or the network is cut"});
    return;
  }
}

void Session::look_at_deadlines(double now_s) {
  wake_at(next_heartbeat_s_);
  RunningOperation* late = nullptr;
  for (const auto& [sequence, running] : running_) {
    if (now_s < running->deadline_s()) {
      running->tell_call_if_stuck(now_s);
      wake_at(running->next_look_s());
    } else if (late == nullptr || precedes(sequence, late->sequence()) ||
               (sequence == late->sequence() && running->is_message() && !late->is_message())) {
      late = running.get();
    }
  }
  if (late == nullptr) return;
  std::vector<Rank> waits_for = late->waits_for();
  std::string whom = !waits_for.empty() ? list_of(waits_for) : late->sends_to_text();
  if (waits_for.empty() && is_far_ahead(*late)) {
    const Rank slow = *far_behind(late->sequence());
    waits_for.push_back(slow);
    whom = "rank " + std::to_string(slow) + ", which is " + std::to_string(late->sequence() - called_by_all_) +
           " operations behind";
  }
  // All ranks read it, whoever is waited for too.
  const std::string text = "rank " + std::to_string(rank()) + " timed out after timeout_s=" +
                           seconds(options_.timeout_s) + ", waiting for " + whom;
  if (late->is_message()) {  // others do not know what it is
    const Rank other = late->call().root;
    fail(failure_of(*late, FailureKind::timeout, other,
                    describe(late->call()) + " of " + text + mistagged(other)));
    return;
  }
  fail(failure_of(*late, FailureKind::timeout, waits_for.empty() ? kNoRank : waits_for.front(), text));
}

}  // namespace telegrad
