// What a session says of an operation that waits for long, before it times out.
#include <algorithm>
#include <cmath>

#include "session/running_operation.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kNamedMost = 4;

std::string whole_seconds(double seconds) { return std::to_string(std::lround(seconds)) + " s"; }

// "rank 3", "ranks 0, 2", "ranks 0, 1, 2, 3 and 60 more".
std::string few_of(std::vector<Rank> ranks) {
  const std::size_t more = ranks.size() > kNamedMost ? ranks.size() - kNamedMost : 0;
  ranks.resize(ranks.size() - more);
  return list_of(ranks) + (more > 0 ? " and " + std::to_string(more) + " more" : "");
}

}  // namespace

void Session::look_for_stalls(double now_s) {
  RunningOperation* oldest = nullptr;
  for (const auto& [sequence, running] : running_) {
    if (now_s < running->stall_at_s()) continue;
    if (oldest == nullptr || precedes(sequence, oldest->sequence())) oldest = running.get();
  }
  if (oldest != nullptr) {
    const bool told = std::ranges::any_of(running_, [](const auto& entry) { return entry.second->stall_told(); });
    for (const auto& [sequence, running] : running_) {  // an older one is the cause of those behind it
      if (now_s >= running->stall_at_s()) running->note_stall(running.get() == oldest && !told, now_s);
      wake_at(running->next_look_s());
    }
    if (!told) {
      stall_s_ *= 2.0;
      stalled_(tells_for_its_host(*oldest) ? stall_text(*oldest, now_s) : std::string());
    }
  }
  if (announced_.empty() || (waited_for_in_ && !precedes(*waited_for_in_, next_sequence_))) return;
  for (const auto& [sequence, calls] : announced_) {
    if (calls.empty() || now_s < calls.front().since_s + stall_s_) continue;
    waited_for_in_ = sequence;
    stalled_({});
    return;
  }
}

// Ranks of one host share a log: the lowest one that waits there tells.
bool Session::tells_for_its_host(const RunningOperation& running) const {
  if (running.is_message()) return true;
  const std::string host = driver_.identity(rank()).host;
  for (Rank peer = 0; peer < rank(); ++peer) {
    if (peers_[peer].called && precedes(running.sequence(), *peers_[peer].called) && driver_.identity(peer).host == host) {
      return false;
    }
  }
  return true;
}

std::string Session::stall_text(const RunningOperation& running, double now_s) const {
  const std::string number = running.is_message() ? "" : " (operation " + std::to_string(running.sequence()) + ")";
  std::string text = "has waited " + whole_seconds(now_s - running.called_s()) + " in " + describe(running.call()) +
                     number + "; " + who_is_missing(running);
  if (std::isfinite(options_.timeout_s)) text += "; an error follows after timeout_s=" + whole_seconds(options_.timeout_s);
  return Failure{.rank = rank(), .reason = std::move(text), .group = options_.group}.message();
}

std::string Session::who_is_missing(const RunningOperation& running) const {
  if (running.is_message()) {
    const std::vector<Rank> waits_for = running.waits_for();
    return "it waits for " + (waits_for.empty() ? running.sends_to_text() : few_of(waits_for) + " to send");
  }
  std::vector<Rank> absent;
  Rank furthest_behind = kNoRank;
  for (Rank peer = 0; peer < size(); ++peer) {
    const Peer& other = peers_[peer];
    if (peer == rank() || (other.called && precedes(running.sequence(), *other.called))) continue;
    absent.push_back(peer);
    const auto called = [&](Rank one) { return peers_[one].called.value_or(0); };
    if (furthest_behind == kNoRank || precedes(called(peer), called(furthest_behind))) furthest_behind = peer;
  }
  if (absent.empty()) {
    const std::vector<Rank> waits_for = running.waits_for();
    return "all ranks have called it, and it waits for " +
           (waits_for.empty() ? running.sends_to_text() : "messages of " + few_of(waits_for));
  }
  std::string text = few_of(absent) + (absent.size() == 1 ? " has" : " have") + " not called it";
  const Peer& behind = peers_[furthest_behind];
  if (behind.called.value_or(0) == 0) {
    text += " (rank " + std::to_string(furthest_behind) + " has called nothing yet)";
  } else {
    text += " (the last call of rank " + std::to_string(furthest_behind) + " was operation " +
            std::to_string(*behind.called - 1) +
            (behind.last_call ? ", " + describe(*behind.last_call) : "") + ")";
  }
  if (precedes(running.sequence(), stall_hint_.from)) return text;
  const bool at_once = !precedes(stall_hint_.from, behind.called.value_or(0));
  const std::string& hint = at_once ? stall_hint_.at_once : stall_hint_.later;
  if (hint.empty()) return text;
  const std::size_t gap = hint.find("{}");
  return text + "; " + (gap == std::string::npos ? hint : hint.substr(0, gap) + few_of(absent) + hint.substr(gap + 2));
}

}  // namespace telegrad
