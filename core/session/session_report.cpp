// What a session tells of itself.
#include <algorithm>

#include "session/running_operation.hpp"

namespace telegrad {

const Session::RunningOperation* Session::running_of(std::uint32_t sequence) const {
  if (const RunningOperation* const running = find_running(sequence)) return running;
  const auto kept = std::ranges::find_if(
      quarantine_, [&](const auto& running) { return running->sequence() == sequence && !running->is_message(); });
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
    SessionReport::OperationReport operation{.entry = *entry};
    if (const RunningOperation* const running = running_of(sequence)) {
      operation.waits_for = running->waits_for();
      operation.sends_to = running->sends_to();
    }
    report.operations.push_back(std::move(operation));
  }
  const auto look = [&](const RunningOperation& running, OperationState state) {
    if (!running.is_message() || report.messages.size() == SessionReport::kMessagesMost) return;
    report.messages.push_back(
        {.call = running.call(), .state = state, .called_s = running.called_s(), .before = running.sequence()});
  };
  for (const auto& running : quarantine_) look(*running, OperationState::failed);
  for (const auto& [sequence, running] : running_) look(*running, OperationState::running);
  return report;
}

}  // namespace telegrad
