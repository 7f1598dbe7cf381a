#include "session/session.hpp"

#include <algorithm>
#include <cmath>

#include "session/running_operation.hpp"

namespace telegrad {
Session::Session(Driver& driver, SessionOptions options)
    : driver_(driver), options_(options), peers_(driver.size()) {
  constexpr double kBeatsPerLiveness = 4.0;
  if (options_.liveness_timeout_s && std::isfinite(options_.heartbeat_s)) {
    options_.heartbeat_s = std::min(options_.heartbeat_s, *options_.liveness_timeout_s / kBeatsPerLiveness);
  }
  // Heartbeats tell what peers have called.
  if (std::isfinite(options_.heartbeat_s)) options_.stall_s = std::max(options_.stall_s, 2.0 * options_.heartbeat_s);
  stall_s_ = options_.stall_s;
  for (Rank far = 1; far < size(); far *= 2) unheard_.push_back((rank() + size() - far) % size());
  std::ranges::sort(unheard_);
  if (options_.count_peers) counters_.peers.resize(driver.size());
  driver_.attach(*this);
}

Session::~Session() { ready_.network_is_gone(); }

std::string Session::missing() const { return list_of(unheard_); }

void Session::begin(RequestPtr request, double now_s) {
  now_s_ = std::max(now_s_, now_s);
  const bool numbered = !is_point_to_point(request->call());
  if (failure_) {
    refuse(*request, next_sequence_ + (numbered ? refused_since_++ : refused_since_));
    return;
  }
  if (parting_) {
    request->finish(named({.rank = rank(), .reason = "the communicator is closed", .group = options_.group},
                          request->call(), next_sequence_));
    return;
  }
  if (!numbered) {
    begin_message(std::move(request), now_s);
    return;
  }
  const std::uint32_t sequence = next_sequence_++;
  counters_.operations += 1;
  history_.called(sequence, request->call(), now_s_);
  request->note_begun({.sequence = sequence, .when_s = now_s_});
  tell_how_far();
  if (frozen(sequence)) {
    refused_.emplace_back(sequence, std::move(request));
    say_if_called();
    return;
  }
  auto owned = std::make_unique<RunningOperation>(*this, sequence, std::move(request), now_s);
  RunningOperation& running = *owned;
  wake_at(running.next_look_s());
  running_.emplace_back(sequence, std::move(owned));
  if (fail_if_abandoned(running)) return;

  if (const auto announced = announced_.find(sequence); announced != announced_.end()) {
    for (const Announced& one : std::exchange(announced->second, {})) {
      if (!agrees(running, one.source, one.call)) break;
    }
    announced_.erase(sequence);
  }
  std::vector<Arrival> waiting;
  if (const auto early = early_.find(sequence); early != early_.end()) {
    waiting = std::move(early->second);
    early_.erase(early);
    for (const Arrival& arrival : waiting) early_bytes_ -= arrival.memory();
  }
  for (const Arrival& arrival : waiting) {
    if (agrees(running, arrival.envelope.source, arrival.envelope.call)) {
      running.deliver(arrival);
    } else {
      driver_.discard(arrival);
    }
  }
  if (!frozen(sequence) && !waits_at_gate(running)) start(running);
}

bool Session::holds(const Request& request) const {
  const auto is_it = [&](const auto& running) { return &running->request() == &request; };
  return std::ranges::any_of(running_, [&](const auto& held) { return is_it(held.second); }) ||
         std::ranges::any_of(quarantine_, is_it) ||
         std::ranges::any_of(refused_, [&](const auto& refused) { return refused.second.get() == &request; });
}

void Session::start(RunningOperation& running) {
  const bool outer = std::exchange(running_turn_, true);
  running.start(run(*this, running));
  running_turn_ = outer;
  if (outer) return;
  fail_if_thrown();
  finish_running();
}

void Session::refuse(Request& request, std::uint32_t sequence) const {
  Failure failure = *failure_;
  const std::string earlier = failure.operation.empty() ? "" : ", in " + failure.operation;
  failure.reason = "the communicator failed earlier" + earlier + "; close it. That failure was: " + failure.reason;
  request.finish(named(std::move(failure), request.call(), sequence));
}

Task<void> Session::run(Session& session, RunningOperation& running) {
  try {
    co_await running.request().start(running);
  } catch (const std::exception& error) {
    session.fail(session.failure_of(running, FailureKind::transport, session.rank(), session.reason_of(error)));
    co_return;
  }
  session.finished_.push_back(&running);
}

bool Session::run_ready() {
  if (all_frozen_) ready_.clear();
  if (ready_.empty()) return false;
  turn_.clear();
  ready_.swap(turn_);
  running_turn_ = true;
  for (const auto coroutine : turn_) {
    if (all_frozen_) break;  // what is left belongs to operations in quarantine
    coroutine.resume();
  }
  running_turn_ = false;
  fail_if_thrown();
  finish_running();
  return true;
}

// The task that awaits it may wait for ever for those beside it.
void Session::fail_if_thrown() {
  const std::exception_ptr thrown = take_thrown();
  if (!thrown || (failing() && !winding_up_)) return;
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    fail(error);
  }
}

// Here no coroutine of the session is running, so that frames may go.
void Session::finish_running() {
  for (RunningOperation* const running : std::exchange(finished_, {})) {
    const auto entry = std::ranges::find(running_, running, [](const auto& held) { return held.second.get(); });
    if (entry == running_.end()) continue;  // failed in the same turn
    const std::unique_ptr<RunningOperation> over = std::move(entry->second);
    running_.erase(entry);
    TELEGRAD_CHECK(over->task().done());
    over->discard_unexpected();
    if (!over->is_message()) {
      history_.ended(over->sequence(), OperationState::completed, now_s_);
      ++completed_;
    }
    over->request().note_ended(now_s_);
    if (over->call().operation == Operation::receive) over->request().note_source(over->call().root);
    over->request().finish(std::nullopt);
    if (const Call& call = over->call(); call.operation == Operation::receive) fail_if_nothing_comes(call.root);
  }
  stop_if_wound_up();
}

Session::RunningOperation* Session::find_running(std::uint32_t sequence) const {
  for (const auto& [number, running] : running_) {
    if (number == sequence && !running->is_message()) return running.get();
  }
  return nullptr;
}

Failure Session::failure_of(const RunningOperation& running, FailureKind kind, Rank peer, std::string reason) const {
  return named({.kind = kind, .rank = rank(), .peer = peer, .reason = std::move(reason), .group = options_.group},
               running.call(), running.sequence());
}

void Session::release_quarantine() {
  ready_.network_is_gone();
  const Failure closed{.rank = rank(),
                       .reason = "the communicator was closed before this operation was over",
                       .group = options_.group};
  const auto finish = [&](std::uint32_t sequence, Request& request) {
    if (request.done()) return;
    request.finish(named(closed, request.call(), sequence));
  };
  gated_.clear();
  for (const auto& [sequence, running] : running_) finish(sequence, running->request());
  for (const auto& running : quarantine_) finish(running->sequence(), running->request());
  for (const auto& [sequence, request] : std::exchange(refused_, {})) finish(sequence, *request);
  quarantine_.clear();
  running_.clear();
}

bool Session::agrees(const RunningOperation& running, Rank source, const Call& call) {
  if (frozen(running.sequence())) return false;
  if (call == running.call()) return true;
  fail(failure_of(running, FailureKind::mismatched_call, source,
                  "the ranks called different things as operation " + std::to_string(running.sequence()) + ": rank " +
                      std::to_string(rank()) + " called " +
                      describe(running.call()) + ", rank " + std::to_string(source) + " called " + describe(call)));
  return false;
}

void Session::on_arrival(const Arrival& arrival) {
  const Envelope& envelope = arrival.envelope;
  const bool message = envelope.call.operation == Operation::send;
  if ((message ? all_frozen_ : frozen(envelope.sequence)) ||
      envelope.epoch != options_.epoch || envelope.communicator != options_.communicator ||
      envelope.source >= size() || envelope.source == rank()) {
    driver_.discard(arrival);
    return;
  }
  if (watches()) peers_[envelope.source].heard_s = now_s_;
  if (message) {
    take_message(arrival);
  } else if (RunningOperation* const running = find_running(envelope.sequence)) {
    if (agrees(*running, envelope.source, envelope.call)) {
      running->deliver(arrival);
    } else {
      driver_.discard(arrival);
    }
  } else if (!precedes(envelope.sequence, next_sequence_)) {
    if (envelope.sequence - next_sequence_ > kAheadMost) {
      driver_.discard(arrival);
      fail({.kind = FailureKind::transport,
            .peer = envelope.source,
            .reason = "a message of rank " + std::to_string(envelope.source) + " for operation " +
                      std::to_string(envelope.sequence) + ", while this rank is at " + std::to_string(next_sequence_)});
      return;
    }
    early_[envelope.sequence].push_back(arrival);
    early_bytes_ += arrival.memory();
    fail_if_full(envelope.source);
  } else {
    driver_.discard(arrival);
    const History::Entry* const ours = history_.find(envelope.sequence);
    const bool same = ours != nullptr && ours->call == envelope.call;
    fail({.kind = same ? FailureKind::transport : FailureKind::mismatched_call,
          .peer = envelope.source,
          .operation = describe(envelope.call),
          .sequence = envelope.sequence,
          .reason = "a message for an operation that is over: rank " + std::to_string(rank()) + " called " +
                    (ours != nullptr ? describe(ours->call) : "it long ago") + ", rank " +
                    std::to_string(envelope.source) + " called " + describe(envelope.call)});
  }
}

// Before memory runs out.
bool Session::fail_if_full(Rank source) {
  if (early_bytes_ + point_to_point_.memory() <= options_.early_most_bytes) return false;
  fail({.kind = FailureKind::transport,
        .peer = source,
        .sequence = next_sequence_,
        .reason = "rank " + std::to_string(rank()) + " keeps more than " + std::to_string(options_.early_most_bytes >> 20) +
                  " MiB of messages for operations or receives that it has not called yet, the last one of rank " +
                  std::to_string(source) + ": let the ranks meet more often, as by a barrier()"});
  return true;
}

// `source` waits for this rank in its operation `sequence`.
void Session::take_announced_call(Rank source, std::uint32_t sequence, const Call& call) {
  if (const RunningOperation* const running = find_running(sequence)) {
    agrees(*running, source, call);
  } else if (!precedes(sequence, next_sequence_)) {
    if (sequence - next_sequence_ > kAheadMost) return;
    auto& known = announced_[sequence];
    if (std::ranges::none_of(known, [&](const auto& one) { return one.source == source; })) {
      known.push_back({source, call, now_s_});
    }
  } else if (const History::Entry* const ours = history_.find(sequence); ours != nullptr && ours->call != call) {
    fail({.kind = FailureKind::mismatched_call,
          .peer = source,
          .operation = describe(call),
          .sequence = sequence,
          .reason = "the ranks called different things as operation " + std::to_string(sequence) + ": rank " +
                    std::to_string(rank()) + " called " +
                    describe(ours->call) + ", rank " + std::to_string(source) + " called " + describe(call)});
  }
}

void Session::on_control(const Control& control) {
  if (control.source >= size() || control.source == rank()) return;
  Peer& peer = peers_[control.source];
  if (control.kind != ControlKind::hello) {
    if (control.epoch != options_.epoch) return;
    peer.heard_s = now_s_;
    if (!peer.called || precedes(*peer.called, control.called)) {
      peer.called = control.called;
      peer.last_call.reset();
    }
    if (precedes(peer.messages, control.messages)) peer.messages = control.messages;
  }
  switch (control.kind) {
    case ControlKind::hello:
      if (control.wire_version != kWireVersion || control.endianness != Control{}.endianness) {
        fail({.kind = FailureKind::transport,
              .peer = control.source,
              .operation = "join",
              .reason = "rank " + std::to_string(control.source) + " speaks wire version " +
                        std::to_string(control.wire_version) + ", this rank " + std::to_string(kWireVersion) +
                        "; install the same telegrad on all hosts"});
      } else if (control.epoch == options_.epoch) {
        std::erase(unheard_, control.source);
      }
      break;
    case ControlKind::heartbeat:
      if (!control.calls.empty() && control.first_call + 1 == *peer.called) peer.last_call = control.calls.front();
      break;
    case ControlKind::call:
      if (!frozen(control.first_call) && !control.calls.empty()) {
        take_announced_call(control.source, control.first_call, control.calls.front());
      }
      break;
    case ControlKind::abort: hear_abort(control); break;
    case ControlKind::goodbye:
      peer.said_goodbye = true;
      if (std::exchange(peer.parted, true)) break;
      ++parted_;
      for (const auto& [sequence, running] : running_) {
        if (fail_if_abandoned(*running)) break;
      }
      fail_if_nothing_comes(control.source);
      conclude_if_agreed();
      break;
  }
}

// True, and everything has stopped, if some peer said goodbye without calling this operation.
bool Session::fail_if_abandoned(const RunningOperation& running) {
  if (parted_ == 0 || running.is_message()) return false;
  for (Rank peer = 0; peer < size(); ++peer) {
    const Peer& other = peers_[peer];
    if (peer == rank() || !other.parted || precedes(running.sequence(), other.called.value_or(0))) continue;
    fail(failure_of(running, FailureKind::peer_failed, peer,
                    "rank " + std::to_string(peer) +
                        " closed its communicator without this operation: it made fewer calls, as with fewer batches, or "
                        "went on after an error"));
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
  const bool nothing_more = all_frozen_ || running_.empty() || driver_.delivers_after_shut_down();
  if (said_goodbye && nothing_more && (all_frozen_ || !sends_to(rank_of_peer))) {
    conclude_if_agreed();
    return;
  }
  const std::string text =
      "rank " + std::to_string(rank_of_peer) +
      (said_goodbye ? " closed its communicator while this operation still needed it" : " failed: " + reason);
  if (agreement_) agreement_->lose(rank_of_peer, text);
  fail({.kind = FailureKind::peer_failed, .peer = rank_of_peer, .sequence = first_unfinished(), .reason = text});
}

void Session::on_damage(const std::string& reason) { fail({.kind = FailureKind::transport, .reason = reason}); }

void Session::part() {
  if (std::exchange(parting_, true)) return;
  if (!std::exchange(peers_[rank()].parted, true)) ++parted_;
  say_if_called();
  discard_unclaimed();
  broadcast({.kind = ControlKind::goodbye});
}

}  // namespace telegrad
