#include "session/session.hpp"

#include <algorithm>
#include <cmath>

#include "session/job.hpp"

namespace telegrad {
namespace {

// Sequence numbers wrap around.
bool precedes(std::uint32_t sequence, std::uint32_t other) { return static_cast<std::int32_t>(sequence - other) < 0; }

}  // namespace

Session::Session(Driver& driver, SessionOptions options) : driver_(driver), options_(options), peers_(driver.size()) {
  driver_.attach(*this);
}

Session::~Session() = default;

void Session::broadcast(const Control& control) {
  for (Rank peer = 0; peer < size(); ++peer) {
    if (peer == rank() || peers_[peer].failed) continue;
    Control message = control;
    message.source = rank();
    message.epoch = options_.epoch;
    driver_.send_control(peer, message);
  }
}

void Session::join(double now_s) {
  peers_[rank()].greeted = true;
  ++greeted_;
  for (auto& peer : peers_) peer.last_heard_s = now_s;
  next_heartbeat_s_ = now_s + options_.heartbeat_s;
  next_deadline_s_ = next_heartbeat_s_;
  broadcast({.kind = ControlKind::hello});
}

std::string Session::missing() const {
  std::string text;
  for (Rank peer = 0; peer < size(); ++peer) {
    if (!peers_[peer].greeted) text += (text.empty() ? "rank " : ", rank ") + std::to_string(peer);
  }
  return text;
}

void Session::begin(RequestPtr request, double now_s) {
  if (failure_) {
    Failure failure = *failure_;
    const std::string earlier = failure.operation.empty() ? "" : ", in " + failure.operation;
    failure.reason = "the communicator failed earlier" + earlier + "; close it. That failure was: " + failure.reason;
    failure.operation = describe(request->call());
    failure.sequence = next_sequence_;
    request->finish(std::move(failure));
    return;
  }
  const std::uint32_t sequence = next_sequence_++;
  counters_.operations += 1;
  auto owned = std::make_unique<Job>(*this, sequence, std::move(request), now_s + options_.timeout_s);
  Job& job = *owned;
  next_deadline_s_ = std::min(next_deadline_s_, job.deadline_s());
  jobs_.emplace(sequence, std::move(owned));
  if (fail_if_abandoned(job)) return;

  std::vector<Arrival> waiting;
  if (const auto early = early_.find(sequence); early != early_.end()) {
    waiting = std::move(early->second);
    early_.erase(early);
  }
  for (const Arrival& arrival : waiting) {
    if (agrees(job, arrival.envelope)) {
      job.deliver(arrival);
    } else {
      driver_.discard(arrival);
    }
  }
  if (failure_) return;
  const bool outer = std::exchange(running_turn_, true);
  job.start(run(*this, job));
  running_turn_ = outer;
  if (!outer) finish_jobs();
}

Task<void> Session::run(Session& session, Job& job) {
  try {
    co_await job.request().start(job);
  } catch (const std::exception& error) {
    session.fail(session.failure_of(job, FailureKind::transport, session.rank(), error.what()));
    co_return;
  }
  session.finished_.push_back(&job);
}

bool Session::run_ready() {
  if (failure_) ready_.clear();
  if (ready_.empty()) return false;
  turn_.clear();
  ready_.swap(turn_);
  running_turn_ = true;
  for (const auto coroutine : turn_) {
    if (failure_) break;  // what is left belongs to jobs in quarantine
    coroutine.resume();
  }
  running_turn_ = false;
  finish_jobs();
  return true;
}

// Here no coroutine of the session is running, so that frames may go.
void Session::finish_jobs() {
  for (Job* const job : std::exchange(finished_, {})) {
    const auto entry = jobs_.find(job->sequence());
    if (entry == jobs_.end()) continue;  // failed in the same turn
    const std::unique_ptr<Job> over = std::move(entry->second);
    jobs_.erase(entry);
    TELEGRAD_CHECK(over->task().done());
    over->request().finish(std::nullopt);
  }
}

Failure Session::failure_of(const Job& job, FailureKind kind, Rank peer, std::string reason) const {
  return {.kind = kind,
          .rank = rank(),
          .peer = peer,
          .operation = describe(job.call()),
          .sequence = job.sequence(),
          .reason = std::move(reason)};
}

void Session::fail(Failure failure) {
  if (failure_) return;
  failure.rank = rank();
  failure_ = failure;
  broadcast({.kind = ControlKind::abort,
             .failure = failure.kind,
             .culprit = failure.peer,
             .sequence = failure.sequence,
             .reason = failure.reason});
  for (auto& [sequence, arrivals] : std::exchange(early_, {})) {
    for (const Arrival& arrival : arrivals) driver_.discard(arrival);
  }
  auto jobs = std::exchange(jobs_, {});
  for (auto& [sequence, job] : jobs) quarantine_.push_back(std::move(job));
  for (auto& job : quarantine_) {
    failure.operation = describe(job->call());
    failure.sequence = job->sequence();
    job->request().finish(failure);
  }
}

void Session::release_quarantine() {
  quarantine_.clear();
  jobs_.clear();
}

bool Session::agrees(Job& job, const Envelope& envelope) {
  if (failure_) return false;
  if (envelope.call == job.call()) return true;
  fail(failure_of(job, FailureKind::mismatched_call, envelope.source,
                  "the ranks called different things: rank " + std::to_string(rank()) + " called " +
                      describe(job.call()) + ", rank " + std::to_string(envelope.source) + " called " +
                      describe(envelope.call)));
  return false;
}

void Session::on_arrival(const Arrival& arrival) {
  const Envelope& envelope = arrival.envelope;
  if (failure_ || envelope.epoch != options_.epoch || envelope.communicator != options_.communicator ||
      envelope.source >= size()) {
    driver_.discard(arrival);
    return;
  }
  peers_[envelope.source].heard = true;
  if (const auto job = jobs_.find(envelope.sequence); job != jobs_.end()) {
    if (agrees(*job->second, envelope)) {
      job->second->deliver(arrival);
    } else {
      driver_.discard(arrival);
    }
  } else if (!precedes(envelope.sequence, next_sequence_)) {
    early_[envelope.sequence].push_back(arrival);
  } else {
    driver_.discard(arrival);
    fail({.kind = FailureKind::mismatched_call,
          .peer = envelope.source,
          .operation = describe(envelope.call),
          .sequence = envelope.sequence,
          .reason = "a message for an operation that is over on rank " + std::to_string(rank())});
  }
}

void Session::on_control(const Control& control) {
  if (control.source >= size() || control.source == rank()) return;
  Peer& peer = peers_[control.source];
  peer.heard = true;
  switch (control.kind) {
    case ControlKind::hello:
      if (control.wire_version != kWireVersion || control.endianness != Control{}.endianness) {
        fail({.kind = FailureKind::transport,
              .peer = control.source,
              .operation = "join",
              .reason = "rank " + std::to_string(control.source) + " speaks wire version " +
                        std::to_string(control.wire_version) + ", this rank " + std::to_string(kWireVersion) +
                        "; install the same telegrad on all hosts"});
      } else if (control.epoch == options_.epoch && !std::exchange(peer.greeted, true)) {
        ++greeted_;
      }
      break;
    case ControlKind::heartbeat: break;
    case ControlKind::abort:
      if (control.epoch != options_.epoch) break;
      fail({.kind = control.failure,
            .peer = control.culprit,
            .operation = "",
            .sequence = control.sequence,
            .reason = control.reason});
      break;
    case ControlKind::goodbye:
      if (control.epoch != options_.epoch || std::exchange(peer.parted, true)) break;
      ++parted_;
      peer.ends_at = control.sequence;
      for (const auto& [sequence, job] : jobs_) {
        if (fail_if_abandoned(*job)) break;
      }
      break;
  }
}

// True, and everything has failed, if some peer said goodbye without calling this operation.
bool Session::fail_if_abandoned(const Job& job) {
  if (parted_ == 0) return false;
  for (Rank peer = 0; peer < size(); ++peer) {
    if (peer == rank() || !peers_[peer].parted || precedes(job.sequence(), peers_[peer].ends_at)) continue;
    fail(failure_of(job, FailureKind::peer_failed, peer,
                    "rank " + std::to_string(peer) + " closed its communicator without this operation"));
    return true;
  }
  return false;
}

void Session::on_peer_failed(Rank rank_of_peer, const std::string& reason) {
  Peer& peer = peers_[rank_of_peer];
  if (std::exchange(peer.failed, true)) return;
  const bool said_goodbye = peer.parted;
  if (!std::exchange(peer.parted, true)) ++parted_;
  // What it called before its goodbye may still be finished, where its messages do not go with it.
  if (said_goodbye && (jobs_.empty() || driver_.delivers_after_shut_down())) return;
  fail({.kind = FailureKind::peer_failed,
        .peer = rank_of_peer,
        .operation = "",
        .reason = said_goodbye ? "rank " + std::to_string(rank_of_peer) +
                                     " closed its communicator while this operation still needed it"
                               : "rank " + std::to_string(rank_of_peer) + " failed: " + reason});
}

void Session::on_damage(const std::string& reason) { fail({.kind = FailureKind::transport, .reason = reason}); }

void Session::part() {
  if (std::exchange(parting_, true)) return;
  if (!std::exchange(peers_[rank()].parted, true)) ++parted_;
  broadcast({.kind = ControlKind::goodbye, .sequence = next_sequence_});
}

void Session::on_time(double now_s) {
  if (now_s < next_deadline_s_) return;
  if (now_s >= next_heartbeat_s_) {
    next_heartbeat_s_ = now_s + options_.heartbeat_s;
    if (!parting_) broadcast({.kind = ControlKind::heartbeat});
    check_liveness(now_s);
  }
  look_at_deadlines(now_s);
}

void Session::check_liveness(double now_s) {
  for (Rank rank_of_peer = 0; rank_of_peer < size(); ++rank_of_peer) {
    Peer& peer = peers_[rank_of_peer];
    if (rank_of_peer == rank() || peer.parted || peer.failed) continue;
    if (std::exchange(peer.heard, false)) peer.last_heard_s = now_s;
    if (!options_.liveness_timeout_s || now_s - peer.last_heard_s <= *options_.liveness_timeout_s) continue;
    fail({.kind = FailureKind::peer_failed,
          .peer = rank_of_peer,
          .operation = "",
          .reason = "rank " + std::to_string(rank_of_peer) + " has been silent for more than liveness_timeout_s=" +
                    std::to_string(*options_.liveness_timeout_s) + " s: its process is frozen or the network is cut"});
    return;
  }
}

void Session::look_at_deadlines(double now_s) {
  next_deadline_s_ = next_heartbeat_s_;
  for (const auto& [sequence, job] : jobs_) {
    if (now_s < job->deadline_s()) {
      next_deadline_s_ = std::min(next_deadline_s_, job->deadline_s());
      continue;
    }
    Rank peer = kNoRank;
    const std::string waiting = job->waits_for(peer);
    fail(failure_of(*job, FailureKind::timeout, peer,
                    "timed out after timeout_s=" + std::to_string(options_.timeout_s) + " s, waiting for " + waiting));
    return;
  }
}

}  // namespace telegrad
