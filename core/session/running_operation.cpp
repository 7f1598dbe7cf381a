#include "session/running_operation.hpp"

#include <algorithm>
#include <set>

namespace telegrad {

void Session::RunningOperation::start_send(Rank to, Step step, ConstBytes bytes, Pending& pending) {
  if (frozen()) return;  // never completes: the operation is over
  last_sent_to_ = to;
  network_reduces_ = false;
  Envelope envelope;
  envelope.epoch = session_.options_.epoch;
  envelope.communicator = session_.options_.communicator;
  envelope.sequence = is_message() ? session_.point_to_point_.next_number(to) : sequence_;
  envelope.step = step;
  envelope.source = rank();
  envelope.length = bytes.size();
  envelope.call = call();
  if (is_message()) {
    envelope.call.root = kNoRank;  // what the receiver knows by itself
    envelope.call.layout = 0;
  }
  session_.count_sent(to, bytes.size());
  moved_.sent += bytes.size();
  session_.driver_.send(to, envelope, bytes, pending);
}

void Session::RunningOperation::start_receive(Rank from, Step step, Bytes into, Pending& pending) {
  if (is_message()) {
    if (!frozen()) session_.post_receive({.call = call_, .into = into, .pending = &pending, .source = &call_.root});
    return;
  }
  post(from, step, Posted{.into = into, .any = nullptr, .most_bytes = into.size(), .pending = &pending});
}

void Session::RunningOperation::start_receive_any(Rank from, Step step, std::size_t most_bytes, Buffer& into, Pending& pending) {
  post(from, step, Posted{.into = {}, .any = &into, .most_bytes = most_bytes, .pending = &pending});
}

void Session::RunningOperation::start_compute(std::size_t bytes, Pending& pending) {
  if (!frozen()) session_.driver_.compute(bytes, pending);
}

void Session::RunningOperation::start_reduce(std::uint64_t turn, DType dtype, Reduction reduction, Buffer& values,
                                             Pending& pending) {
  if (frozen()) return;
  last_sent_to_ = kNoRank;
  network_reduces_ = true;
  session_.driver_.reduce(turn, dtype, reduction, values, pending);
}

void Session::RunningOperation::start_fail(Rank culprit, std::string reason) {
  session_.fail(session_.failure_of(*this, FailureKind::transport, culprit, std::move(reason)));
}

void Session::RunningOperation::post(Rank from, Step step, Posted posted) {
  if (frozen()) return;
  if (const auto waiting = unexpected_.take(from, step)) {
    take(*waiting, posted);
  } else {
    const bool fresh = posted_.insert(from, step, posted);
    TELEGRAD_CHECK(fresh);
  }
}

void Session::RunningOperation::deliver(const Arrival& arrival) {
  const Envelope& envelope = arrival.envelope;
  if (const auto posted = posted_.take(envelope.source, envelope.step)) {
    take(arrival, *posted);
  } else if (!unexpected_.insert(envelope.source, envelope.step, arrival)) {
    session_.driver_.discard(arrival);
    session_.fail(session_.failure_of(*this, FailureKind::transport, arrival.envelope.source,
                                      "step " + std::to_string(arrival.envelope.step) + " arrived twice"));
  }
}

std::string Session::RunningOperation::reason_of_length(const Envelope& envelope, const Posted& posted) const {
  const std::string lengths = " has " + std::to_string(envelope.length) + " bytes instead of " +
                              (posted.any == nullptr ? "" : "at most ") + std::to_string(posted.most_bytes);
  if (call_.operation != Operation::all_to_all || call_.layout == 0) {
    return "step " + std::to_string(envelope.step) + lengths;
  }
  // Two ranks' own lengths, which no envelope compares: most likely nothing is damaged, and the callers disagree.
  const std::string here = std::to_string(session_.rank()), there = std::to_string(envelope.source);
  return "the block of rank " + there + " for rank " + here + lengths + ": compare send_counts[" + here + "] on rank " +
         there + " with receive_counts[" + there + "] on rank " + here;
}

void Session::RunningOperation::take(const Arrival& arrival, const Posted& posted) {
  const std::size_t length = arrival.envelope.length;
  if (length > posted.most_bytes || (posted.any == nullptr && length != posted.most_bytes)) {
    session_.driver_.discard(arrival);
    session_.fail(session_.failure_of(*this, FailureKind::transport, arrival.envelope.source,
                                      reason_of_length(arrival.envelope, posted)));
    return;
  }
  session_.count_received(arrival.envelope.source, length);
  moved_.received += length;
  Bytes into = SizeOnly::active() ? Bytes{} : posted.into;  // the caller's memory is only claimed then
  if (posted.any != nullptr) {
    *posted.any = Buffer(length);
    into = posted.any->bytes();
  }
  session_.driver_.accept(arrival, into, *posted.pending);
}

void Session::RunningOperation::discard_unexpected() {
  std::exchange(unexpected_, {}).for_each([&](Rank, const Arrival& arrival) { session_.driver_.discard(arrival); });
}

std::vector<Rank> Session::RunningOperation::waits_for() const {
  std::set<Rank> ranks;
  if (call_.operation == Operation::receive) {
    if (call_.root != kNoRank) return {call_.root};
    for (Rank peer = 0; peer < size(); ++peer) {
      if (peer != rank()) ranks.insert(peer);
    }
  }
  posted_.for_each([&](Rank source, const Posted&) { ranks.insert(source); });
  return {ranks.begin(), ranks.end()};
}

std::vector<Rank> Session::RunningOperation::sends_to() const {
  return last_sent_to_ == kNoRank ? std::vector<Rank>{} : std::vector<Rank>{last_sent_to_};
}

std::string Session::RunningOperation::sends_to_text() const {
  if (is_shut_) return "the stream that fills its memory";
  if (network_reduces_) return "the network's own collective";
  if (last_sent_to_ == kNoRank) return "itself";
  return "rank " + std::to_string(last_sent_to_) + " to take its message";
}

void Session::RunningOperation::tell_call_if_stuck(double now_s) {
  constexpr double kGapMost_s = 1.0;
  if (now_s < tell_at_s_) return;
  tell_gap_s_ = std::min(2.0 * tell_gap_s_, std::max(kGapMost_s, tell_gap_s_));
  tell_at_s_ = now_s + tell_gap_s_;
  const Control control{.kind = ControlKind::call, .first_call = sequence_, .calls = {call()}};
  for (const Rank peer : waits_for()) {
    if (!session_.peers_[peer].failed) session_.send(peer, control);
  }
}

}  // namespace telegrad
