// How a session stops: what it tells its peers, how long it listens, and what its operations end with.
#include <algorithm>

#include "session/job.hpp"

namespace telegrad {

std::uint32_t Session::first_unfinished() const {
  std::uint32_t first = next_sequence_;
  for (const auto& [sequence, job] : jobs_) {
    if (precedes(sequence, first)) first = sequence;
  }
  return first;
}

void Session::fail(Failure failure) {
  if (stopped()) return;
  stop({.kind = failure.kind,
        .origin = rank(),
        .culprit = failure.peer,
        .sequence = failure.sequence,
        .reason = std::move(failure.reason)});
}

void Session::stop(Statement mine) {
  // What this rank called before the oldest unfinished operation tells others where it left them.
  constexpr std::uint32_t kBefore = 8;
  mine.called = next_sequence_;
  mine.first_call = first_unfinished() - kBefore;
  for (std::uint32_t sequence = mine.first_call; precedes(sequence, mine.called); ++sequence) {
    if (mine.calls.size() == Control::kCallsMost) break;
    if (const History::Entry* const entry = history_.find(sequence)) {
      mine.calls.push_back(entry->call);
    } else if (mine.calls.empty()) {
      mine.first_call = sequence + 1;
    } else {
      break;
    }
  }
  mine.reason.resize(std::min(mine.reason.size(), Control::kReasonMost));
  broadcast({.kind = ControlKind::abort,
             .failure = mine.kind,
             .origin = mine.origin,
             .culprit = mine.culprit,
             .sequence = mine.sequence,
             .first_call = mine.first_call,
             .calls = mine.calls,
             .reason = mine.reason});
  agreement_.emplace(size(), rank(), std::move(mine));

  for (auto& [sequence, arrivals] : std::exchange(early_, {})) {
    for (const Arrival& arrival : arrivals) driver_.discard(arrival);
  }
  for (auto& [sequence, job] : std::exchange(jobs_, {})) {
    history_.ended(sequence, OperationState::failed, now_s_);
    quarantine_.push_back(std::move(job));
  }
  std::ranges::sort(quarantine_, [](const auto& a, const auto& b) { return precedes(a->sequence(), b->sequence()); });
  wake_at(now_s_);  // to set the end of listening, once the time is known
  if (options_.agreement_s <= 0.0) {
    conclude();
  } else {
    conclude_if_agreed();
  }
}

void Session::hear_abort(const Control& control) {
  if (failure_) return;
  Statement statement{.kind = control.failure,
                      .origin = control.origin,
                      .culprit = control.culprit,
                      .sequence = control.sequence,
                      .reason = control.reason,
                      .called = control.called,
                      .first_call = control.first_call,
                      .calls = control.calls};
  if (!stopped()) {
    stop({.kind = statement.kind,
          .origin = statement.origin,
          .culprit = statement.culprit,
          .sequence = statement.sequence,
          .reason = statement.reason});
  }
  if (failure_) return;
  agreement_->add(control.source, std::move(statement));
  conclude_if_agreed();
}

// Once everybody has spoken who still can.
void Session::conclude_if_agreed() {
  if (!stopped() || failure_) return;
  for (Rank peer = 0; peer < size(); ++peer) {
    if (agreement_->heard(peer) || peers_[peer].parted || agreement_->is_lost(peer)) continue;
    return;
  }
  conclude();
}

void Session::conclude() {
  const Agreement::Verdict verdict = agreement_->verdict();
  const PeerIdentity identity = verdict.culprit < size() ? driver_.identity(verdict.culprit) : PeerIdentity{};
  Failure failure{.kind = verdict.kind,
                  .rank = rank(),
                  .peer = verdict.culprit,
                  .host = identity.host,
                  .pid = identity.pid,
                  .sequence = verdict.sequence,
                  .reason = verdict.reason};
  failure_ = failure;
  if (failure.kind == FailureKind::timeout && timed_out_) {
    failure.reason += timed_out_();
    failure_ = failure;
  }
  for (const auto& job : quarantine_) {
    failure.operation = describe(job->call());
    failure.sequence = job->sequence();
    if (job == quarantine_.front()) failure_->operation = failure.operation;
    job->request().finish(failure);
  }
  for (const auto& [sequence, request] : std::exchange(refused_, {})) refuse(*request, sequence);
}

}  // namespace telegrad
