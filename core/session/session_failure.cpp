// How a session stops: what it tells its peers, how long it listens, and what its operations end with.
#include <algorithm>
#include <new>

#include "session/running_operation.hpp"

namespace telegrad {
namespace {

// Of a reason that is longer than a message may say; a character of several bytes is kept or left as a whole.
std::size_t fitting_bytes(const std::string& reason) {
  std::size_t bytes = std::min(reason.size(), Control::kReasonMost);
  const auto continues = [&](std::size_t at) { return (static_cast<unsigned char>(reason[at]) & 0xC0) == 0x80; };
  constexpr std::size_t kOfACharacter = 4;
  std::size_t whole = bytes;
  while (whole > 0 && bytes - whole < kOfACharacter && whole < reason.size() && continues(whole)) --whole;
  return bytes - whole < kOfACharacter ? whole : bytes;  // else it is no UTF-8
}

// A rank's own program has ended it, or what it ran has: it says so itself. What came before that operation goes on.
bool gives_up(const Statement& statement) {
  return statement.kind == FailureKind::transport && statement.origin == statement.culprit &&
         statement.origin != kNoRank && !statement.point_to_point;
}

}  // namespace

std::uint32_t Session::first_unfinished() const {
  std::uint32_t first = next_sequence_;
  const auto look = [&](std::uint32_t sequence) {
    if (precedes(sequence, first)) first = sequence;
  };
  for (const auto& [sequence, running] : running_) {
    if (!running->is_message()) look(sequence);
  }
  for (const auto& running : quarantine_) {
    if (!running->is_message()) look(running->sequence());
  }
  return first;
}

void Session::fail(Failure failure) {
  const bool named = failure.peer < size();
  Statement mine{.kind = failure.kind,
                 .origin = rank(),
                 .culprit = failure.peer,
                 .culprit_speaks = named && peers_[failure.peer].said_goodbye && !peers_[failure.peer].failed,
                 .point_to_point = failure.tag.has_value(),
                 .sequence = failure.sequence,
                 .reason = std::move(failure.reason)};
  if (failure.kind == FailureKind::mismatched_call && !mine.point_to_point) {
    dispute(std::move(mine));
  } else {
    stop(std::move(mine));
  }
}

std::string Session::reason_of(const std::exception& thrown) const {
  const bool memory = dynamic_cast<const std::bad_alloc*>(&thrown) != nullptr;
  return "rank " + std::to_string(rank()) + (memory ? " ran out of memory" : std::string(" cannot go on: ") + thrown.what());
}

void Session::fail(const std::exception& thrown) { give_up(reason_of(thrown)); }

void Session::give_up(std::string reason) {
  fail({.kind = FailureKind::transport,
        .rank = rank(),
        .peer = rank(),
        .sequence = first_unfinished(),
        .reason = std::move(reason)});
}

void Session::stop(Statement mine) {
  if (failure_) return;
  if (!agreement_) agreement_.emplace(size(), rank());
  if (winding_up_) {
    if (mine.point_to_point) return;  // that a message will not come any more follows from the rank's end
    if (gives_up(mine)) {  // another one does; it may have finished less
      freeze_from(mine.sequence);
      stop_if_wound_up();
    } else {
      stop_winding_up();
    }
    return;
  }
  const bool stopped_already = all_frozen_ || frozen_from_;
  if (!stopped_already && gives_up(mine) && options_.agreement_s > 0.0) {
    winding_up_ = true;
    freeze_from(mine.sequence);
    to_say_ = std::move(mine);
    listen(options_.dispute_s);
    stop_if_wound_up();
    return;
  }
  freeze_all();
  const bool timed_out = mine.kind == FailureKind::timeout;
  if (!agreement_->heard(rank())) say(std::move(mine));
  listen(timed_out ? options_.agreement_after_timeout_s() : options_.agreement_s);
}

void Session::stop_winding_up() {
  winding_up_ = false;
  stop(std::exchange(to_say_, {}));
}

// An operation goes on for as long as no rank is known that will never call it.
void Session::stop_if_wound_up() {
  if (!winding_up_) return;
  const bool busy = std::ranges::any_of(running_, [&](const auto& entry) {
    return !entry.second->is_message() && agreement_->all_heard_have_called(entry.first);
  });
  if (!busy) stop_winding_up();
}

void Session::dispute(Statement mine) {
  if (failure_) return;
  if (!agreement_) agreement_.emplace(size(), rank());
  if (winding_up_ && !precedes(mine.sequence, to_say_.sequence)) return;
  winding_up_ = false;
  freeze_from(mine.sequence);
  if (to_say_.origin == kNoRank || precedes(mine.sequence, to_say_.sequence)) to_say_ = std::move(mine);
  say_if_called();
  listen(options_.agreement_s > 0.0 ? options_.dispute_s : 0.0);
}

void Session::freeze_from(std::uint32_t first) {
  if (frozen(first)) return;
  frozen_from_ = first;
  put_away_frozen();
}

void Session::freeze_all() {
  if (std::exchange(all_frozen_, true)) return;
  put_away_frozen();
}

void Session::put_away_frozen() {
  for (auto& [sequence, arrivals] : early_) {
    if (!frozen(sequence)) continue;
    for (const Arrival& arrival : std::exchange(arrivals, {})) {
      early_bytes_ -= arrival.memory();
      driver_.discard(arrival);
    }
  }
  if (all_frozen_) discard_messages();
  std::erase_if(gated_, [](const RunningOperation* running) { return running->frozen(); });
  for (auto running = running_.begin(); running != running_.end();) {
    if (!running->second->frozen()) {
      ++running;
      continue;
    }
    if (!running->second->is_message()) history_.ended(running->first, OperationState::failed, now_s_);
    running->second->discard_unexpected();
    quarantine_.push_back(std::move(running->second));
    running = running_.erase(running);
  }
}

void Session::say_if_called() {
  if (!agreement_ || agreement_->heard(rank()) || !frozen_from_ || winding_up_) return;
  if (parting_ || precedes(*frozen_from_, next_sequence_)) say(to_say_);  // who leaves will never call it
}

const Call* Session::call_of(std::uint32_t sequence) const {
  if (const RunningOperation* const running = running_of(sequence)) return &running->call();
  for (const auto& [refused, request] : refused_) {
    if (refused == sequence && !is_point_to_point(request->call())) return &request->call();
  }
  const History::Entry* const entry = history_.find(sequence);
  return entry == nullptr ? nullptr : &entry->call;
}

// With what this rank called around the failure. All ranks tell of the same operations: those around the one that differs,
// or after the oldest that is not finished.
void Session::say(Statement mine) {
  constexpr std::uint32_t kBefore = 16;
  mine.called = next_sequence_;
  const bool mismatch = mine.kind == FailureKind::mismatched_call;
  const std::uint32_t first = (mismatch ? mine.sequence : first_unfinished()) - kBefore;
  mine.first_call = first;
  for (std::uint32_t i = 0; i < Control::kCallsMost; ++i) {
    const Call* const call = precedes(first + i, next_sequence_) ? call_of(first + i) : nullptr;
    if (call != nullptr) {
      mine.calls.push_back(*call);
    } else if (mine.calls.empty()) {
      mine.first_call = first + i + 1;
    } else {
      break;
    }
  }
  mine.reason.resize(fitting_bytes(mine.reason));
  broadcast({.kind = ControlKind::abort,
             .failure = mine.kind,
             .origin = mine.origin,
             .culprit = mine.culprit,
             .culprit_speaks = mine.culprit_speaks,
             .point_to_point = mine.point_to_point,
             .sequence = mine.sequence,
             .first_call = mine.first_call,
             .calls = mine.calls,
             .reason = mine.reason});
  agreement_->add(rank(), std::move(mine));
  conclude_if_agreed();
}

void Session::listen(double most_s) {
  if (failure_) return;
  if (most_s <= 0.0) {
    conclude();
    return;
  }
  listen_s_ = std::min(most_s, listen_s_.value_or(most_s));
  wake_at(now_s_);  // the time is known then
}

void Session::hear_abort(const Control& control) {
  if (failure_) return;
  if (control.origin >= size() || (control.culprit >= size() && control.culprit != kNoRank)) {
    on_damage("rank " + std::to_string(control.source) + " blames a rank that does not exist");
    return;
  }
  if (!agreement_) agreement_.emplace(size(), rank());
  Statement adopted{.kind = control.failure,
                    .origin = control.origin,
                    .culprit = control.culprit,
                    .culprit_speaks = control.culprit_speaks,
                    .point_to_point = control.point_to_point,
                    .sequence = control.sequence,
                    .reason = control.reason};
  Statement theirs = adopted;
  theirs.called = control.called;
  theirs.first_call = control.first_call;
  theirs.calls = control.calls;
  agreement_->add(control.source, std::move(theirs));
  if (control.failure == FailureKind::mismatched_call && !control.point_to_point) {
    // What differed may have been noticed late. Who waits in the first operation that differs is to say so too.
    const auto first = agreement_->mismatched_operation();
    if (first && precedes(*first, adopted.sequence)) adopted.sequence = *first;
    dispute(std::move(adopted));
  } else {
    if (control.failure == FailureKind::timeout) look_further_back(adopted);
    stop(std::move(adopted));
  }
  stop_if_wound_up();
  conclude_if_agreed();
}

// A peer's operation timed out while an earlier one keeps this rank waiting: then that is where to look for the cause.
void Session::look_further_back(Statement& timed_out) const {
  const RunningOperation* const oldest = running_of(first_unfinished());
  if (oldest == nullptr || !precedes(oldest->sequence(), timed_out.sequence)) return;
  const std::vector<Rank> waits_for = oldest->waits_for();
  timed_out.origin = rank();
  timed_out.culprit = waits_for.empty() ? kNoRank : waits_for.front();
  timed_out.reason += "; rank " + std::to_string(rank()) + " was still in operation " +
                      std::to_string(oldest->sequence()) + ", " + describe(oldest->call()) + ", waiting for " +
                      (waits_for.empty() ? oldest->sends_to_text() : list_of(waits_for));
  timed_out.sequence = oldest->sequence();
  timed_out.point_to_point = false;
}

// Once everybody has spoken who still can.
void Session::conclude_if_agreed() {
  if (!agreement_ || failure_ || !agreement_->heard(rank())) return;
  for (Rank peer = 0; peer < size(); ++peer) {
    if (agreement_->heard(peer) || peers_[peer].failed || agreement_->is_lost(peer)) continue;
    return;  // also of who has said goodbye: it listens until all have
  }
  conclude();
}

void Session::conclude() {
  freeze_all();
  for (Rank peer = 0; peer < size(); ++peer) {
    if (peers_[peer].said_goodbye) agreement_->leave(peer, peers_[peer].called.value_or(0));
  }
  std::ranges::sort(quarantine_, [](const auto& a, const auto& b) { return precedes(a->sequence(), b->sequence()); });
  const Agreement::Verdict verdict = agreement_->verdict();
  const PeerIdentity identity = verdict.culprit < size() ? driver_.identity(verdict.culprit) : PeerIdentity{};
  Failure failure{.kind = verdict.kind,
                  .rank = rank(),
                  .peer = verdict.culprit,
                  .host = identity.host,
                  .pid = identity.pid,
                  .sequence = verdict.sequence,
                  .reason = verdict.reason,
                  .group = options_.group};
  failure_ = failure;  // what timed_out_() writes holds it
  if (failure.kind == FailureKind::timeout && timed_out_) {
    failure.reason += timed_out_();
    failure_ = failure;
  }
  for (const auto& running : quarantine_) {
    failure = named(std::move(failure), running->call(), running->sequence());
    if (running == quarantine_.front()) failure_->operation = failure.operation;
    running->request().finish(failure);
  }
  for (const auto& [sequence, request] : std::exchange(refused_, {})) {
    if (!is_point_to_point(request->call())) history_.ended(sequence, OperationState::failed, now_s_);
    refuse(*request, sequence);
  }
}

}  // namespace telegrad
