// What a session tells of itself.
#include <algorithm>

#include "session/job.hpp"

namespace telegrad {

const Session::Job* Session::job_of(std::uint32_t sequence) const {
  if (const Job* const job = running_job(sequence)) return job;
  const auto kept = std::ranges::find_if(
      quarantine_, [&](const auto& job) { return job->sequence() == sequence && !job->is_message(); });
  return kept == quarantine_.end() ? nullptr : kept->get();
}

SessionReport Session::report(double now_s) const {
  SessionReport report{.rank = rank(),
                       .size = size(),
                       .epoch = options_.epoch,
                       .now_s = now_s,
                       .timeout_s = options_.timeout_s,
                       .liveness_timeout_s = options_.liveness_timeout_s,
                       .group = options_.group,
                       .called = next_sequence_,
                       .completed = completed_,
                       .failure = failure_};
  for (Rank rank_of_peer = 0; rank_of_peer < size(); ++rank_of_peer) {
    if (rank_of_peer == rank()) continue;
    const Peer& peer = peers_[rank_of_peer];
    const PeerIdentity identity = driver_.identity(rank_of_peer);
    const bool lost = (peer.failed && !peer.said_goodbye) || (agreement_ && agreement_->is_lost(rank_of_peer));
    report.peers.push_back({.rank = rank_of_peer,
                            .host = identity.host,
                            .pid = identity.pid,
                            .state = lost ? "failed" : peer.parted ? "closed" : "alive",
                            .called = peer.called,
                            .heard_s_ago = now_s - peer.heard_s});
  }
  for (std::uint32_t sequence = next_sequence_ - History::kLength; sequence != next_sequence_; ++sequence) {
    const History::Entry* const entry = history_.find(sequence);
    if (entry == nullptr) continue;
    SessionReport::Operation operation{.entry = *entry};
    if (const Job* const job = job_of(sequence)) {
      operation.waits_for = job->waits_for();
      operation.sends_to = job->sends_to();
    }
    report.operations.push_back(std::move(operation));
  }
  const auto look = [&](const Job& job, OperationState state) {
    if (!job.is_message() || report.messages.size() == SessionReport::kMessagesMost) return;
    report.messages.push_back(
        {.call = job.call(), .state = state, .called_s = job.called_s(), .before = job.sequence()});
  };
  for (const auto& job : quarantine_) look(*job, OperationState::failed);
  for (const auto& [sequence, job] : jobs_) look(*job, OperationState::running);
  return report;
}

}  // namespace telegrad
