// What a session does with messages between two ranks, which no other rank knows of.
#include <algorithm>
#include <utility>

#include "session/running_operation.hpp"

namespace telegrad {
namespace {

bool is_of_anybody(const Call& call) { return call.operation == Operation::receive && call.root == kNoRank; }

}  // namespace

void Session::begin_message(RequestPtr request, double now_s) {
  const Call call = request->call();
  TELEGRAD_CHECK(is_of_anybody(call) || (call.root < size() && call.root != rank()));
  counters_.operations += 1;
  if (all_frozen_) {
    refused_.emplace_back(next_sequence_, std::move(request));
    return;
  }
  auto owned = std::make_unique<RunningOperation>(*this, next_sequence_, std::move(request), now_s);
  RunningOperation& running = *owned;
  wake_at(running.next_look_s());
  running_.emplace_back(next_sequence_, std::move(owned));
  if (!waits_at_gate(running)) start_message(running);
}

void Session::start_message(RunningOperation& running) {
  const Call call = running.call();
  if (call.operation == Operation::send && peers_[call.root].parted) {
    fail(failure_of(running, FailureKind::peer_failed, call.root,
                    "rank " + std::to_string(call.root) + " has closed its communicator: it cannot receive what rank " +
                        std::to_string(rank()) + " sends"));
    return;
  }
  start(running);
  if (is_of_anybody(call)) {
    fail_if_nobody_sends();
  } else {
    fail_if_nothing_comes(call.root);
  }
}

void Session::take_message(const Arrival& arrival) {
  const Rank source = arrival.envelope.source;
  const auto taken = point_to_point_.take(arrival);
  if (taken != PointToPoint::Taken::yes) {
    driver_.discard(arrival);
    fail({.kind = FailureKind::transport,
          .peer = source,
          .sequence = next_sequence_,
          .reason = "message " + std::to_string(arrival.envelope.sequence) + " of rank " + std::to_string(source) +
                    " to rank " + std::to_string(rank()) +
                    (taken == PointToPoint::Taken::twice ? " arrived twice" : " arrived long before its turn")});
    return;
  }
  while (const auto met = point_to_point_.next(source)) receive(met->arrival, met->receive);
  if (parting_) discard_unclaimed();
  if (!fail_if_full(source)) fail_if_nothing_comes(source);
}

void Session::post_receive(const PointToPoint::Receive& posted) {
  if (const auto arrival = point_to_point_.post(posted)) receive(*arrival, posted);
}

void Session::receive(const Arrival& arrival, const PointToPoint::Receive& posted) {
  const Envelope& envelope = arrival.envelope;
  *posted.source = envelope.source;
  const auto refuse_it = [&](FailureKind kind, Rank culprit, std::string reason) {
    driver_.discard(arrival);
    fail({.kind = kind,
          .rank = rank(),
          .peer = culprit,
          .operation = describe(posted.call),
          .sequence = next_sequence_,
          .tag = static_cast<std::uint32_t>(posted.call.layout),
          .reason = std::move(reason)});
  };
  Call sent = envelope.call;
  sent.root = rank();
  sent.layout = envelope.step;
  if (sent.dtype != posted.call.dtype || sent.count != posted.call.count) {
    // Of two that differ the lower one is taken for right, as everywhere.
    const auto told = [](Rank who, const Call& call) {
      return "rank " + std::to_string(who) + " called " + describe(call);
    };
    const std::string ours = told(rank(), posted.call);
    const std::string theirs = told(envelope.source, sent);
    refuse_it(FailureKind::mismatched_call, std::max(rank(), envelope.source),
              "two ranks called different things: " +
                  (rank() < envelope.source ? ours + ", " + theirs : theirs + ", " + ours));
    return;
  }
  if (envelope.length != posted.into.size()) {
    refuse_it(FailureKind::transport, envelope.source,
              "a message of rank " + std::to_string(envelope.source) + " has " + std::to_string(envelope.length) +
                  " bytes instead of " + std::to_string(posted.into.size()));
    return;
  }
  counters_.messages_received += 1;
  counters_.bytes_received += envelope.length;
  driver_.accept(arrival, SizeOnly::active() ? Bytes{} : posted.into, *posted.pending);
}

// Its goodbye tells how many messages it has sent here, and may have overtaken them.
void Session::fail_if_nothing_comes(Rank source) {
  if (all_frozen_ || !sends_no_more(source)) return;
  const PointToPoint::Receive* const waiting = point_to_point_.waiting_for(source);
  if (waiting == nullptr) {
    fail_if_nobody_sends();
    return;
  }
  const auto receives = std::ranges::count_if(running_, [&](const auto& entry) {
    const Call& call = entry.second->call();
    return call.operation == Operation::receive && call.root == source;
  });
  if (std::cmp_greater(receives, point_to_point_.count_waiting_for(source))) return;  // first what is on its way
  fail({.kind = FailureKind::peer_failed,
        .rank = rank(),
        .peer = source,
        .operation = describe(waiting->call),
        .sequence = next_sequence_,
        .tag = static_cast<std::uint32_t>(waiting->call.layout),
        .reason = "rank " + std::to_string(source) + " closed its communicator without sending what rank " +
                  std::to_string(rank()) + " waits for in " + describe(waiting->call) + mistagged(source)});
}

bool Session::sends_no_more(Rank source) const {
  return peers_[source].said_goodbye && !precedes(point_to_point_.come_from(source), peers_[source].messages);
}

// A receive from anybody waits for as long as there is somebody.
void Session::fail_if_nobody_sends() {
  const PointToPoint::Receive* const waiting = point_to_point_.waiting_for(kNoRank);
  if (all_frozen_ || waiting == nullptr) return;
  for (Rank peer = 0; peer < size(); ++peer) {
    if (peer != rank() && !sends_no_more(peer)) return;
  }
  const bool comes = std::ranges::any_of(running_, [](const auto& entry) {
    const Call& call = entry.second->call();
    return call.operation == Operation::receive && call.root != kNoRank;
  });
  if (comes) return;  // first what is on its way
  fail({.kind = FailureKind::peer_failed,
        .rank = rank(),
        .peer = rank() == 0 ? Rank{1} : Rank{0},  // one of them all
        .operation = describe(waiting->call),
        .sequence = next_sequence_,
        .tag = static_cast<std::uint32_t>(waiting->call.layout),
        .reason = "all other ranks closed their communicators without sending what rank " + std::to_string(rank()) +
                  " waits for in " + describe(waiting->call)});
}

// A message that nobody receives, while a receive waits, has most likely got another tag by mistake.
std::string Session::mistagged(Rank source) const {
  const Arrival* const other = point_to_point_.unclaimed(source);
  if (other == nullptr) return "";
  return "; a message of rank " + std::to_string(source) + " with tag " + std::to_string(other->envelope.step) +
         " has come, which nobody has asked for";
}

// Where nothing more is received, nobody is to wait until it is.
void Session::discard_unclaimed() {
  point_to_point_.discard_unclaimed([this](const Arrival& arrival) { driver_.discard(arrival); });
}

void Session::discard_messages() {
  point_to_point_.clear([this](const Arrival& arrival) { driver_.discard(arrival); });
}

// True if `peer`, which has gone, was to take a message from here.
bool Session::sends_to(Rank peer) const {
  return std::ranges::any_of(running_, [&](const auto& entry) {
    const Call& call = entry.second->call();
    return call.operation == Operation::send && call.root == peer;
  });
}

}  // namespace telegrad
