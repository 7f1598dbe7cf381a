#include "session/agreement.hpp"

#include <algorithm>
#include <utility>

#include "base/check.hpp"

namespace telegrad {
namespace {

const Call* call_at(const Statement& statement, std::uint32_t sequence) {
  const std::uint32_t index = sequence - statement.first_call;
  return index < statement.calls.size() ? &statement.calls[index] : nullptr;
}

// In the order in which a program calls.
bool earlier(const Statement& statement, const Statement& other) {
  if (statement.sequence != other.sequence) return precedes(statement.sequence, other.sequence);
  return statement.point_to_point && !other.point_to_point;
}

bool accuses(const std::optional<Statement>& statement, Rank rank) {
  return statement && statement->kind == FailureKind::peer_failed && statement->culprit == rank;
}

}  // namespace

std::string list_of(const std::vector<Rank>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? " " : ", ") + std::to_string(ranks[i]);
  return text;
}

void Agreement::add(Rank rank, Statement statement) {
  if (!statements_[rank]) statements_[rank] = std::move(statement);
}

void Agreement::lose(Rank rank, std::string reason) {
  if (!losses_[rank]) losses_[rank] = std::move(reason);
}

bool Agreement::is_lost(Rank rank) const {
  if (losses_[rank]) return true;
  return std::ranges::any_of(statements_,
                             [rank](const auto& one) { return accuses(one, rank) && !one->culprit_speaks; });
}

bool Agreement::all_heard_have_called(std::uint32_t sequence) const {
  return std::ranges::all_of(statements_,
                             [&](const auto& one) { return !one || precedes(sequence, one->called); });
}

bool Agreement::is_accused(Rank rank) const {
  return std::ranges::any_of(statements_, [rank](const auto& one) { return accuses(one, rank); });
}

Agreement::Verdict Agreement::verdict() const {
  if (auto found = mismatch()) return *std::move(found);
  if (auto found = admitted()) return *std::move(found);
  if (auto found = damage()) return *std::move(found);
  if (auto found = lost()) return *std::move(found);
  return timed_out();
}

std::optional<std::uint32_t> Agreement::mismatched_operation() const {
  const auto found = mismatch();
  return found ? std::optional(found->sequence) : std::nullopt;
}

// The first operation that not all called alike. The largest group is taken to be right, in a tie that of the lowest
// rank. A time-out may be a mismatch too, between ranks that wait for each other without having met; and so may it be
// when a rank has left too early, since one call too many somewhere else shifts all that follow.
std::optional<Agreement::Verdict> Agreement::mismatch() const {
  const Statement* told = nullptr;
  const Statement* earliest = nullptr;
  for (const auto& statement : statements_) {
    if (!statement) continue;
    const bool mismatched = statement->kind == FailureKind::mismatched_call;
    if (mismatched && (told == nullptr || earlier(*statement, *told))) told = &*statement;
    if (!mismatched && statement->kind != FailureKind::timeout && !statement->culprit_speaks) continue;
    if (earliest == nullptr || precedes(statement->first_call, earliest->first_call)) earliest = &*statement;
  }
  if (earliest == nullptr) return std::nullopt;

  std::vector<std::uint32_t> known;  // sequence numbers of which some rank has told its call
  for (const auto& statement : statements_) {
    for (std::uint32_t i = 0; statement && i < statement->calls.size(); ++i) known.push_back(statement->first_call + i);
  }
  // In the order of operations: numbers are near the first one, on either side.
  const std::uint32_t near = earliest->first_call - (std::uint32_t{1} << 31);
  std::ranges::sort(known, {}, [near](std::uint32_t sequence) { return sequence - near; });
  known.erase(std::unique(known.begin(), known.end()), known.end());
  for (const std::uint32_t sequence : known) {
    std::vector<std::pair<Call, std::vector<Rank>>> groups;  // by their lowest rank
    for (Rank rank = 0; rank < statements_.size(); ++rank) {
      const Call* const call = statements_[rank] ? call_at(*statements_[rank], sequence) : nullptr;
      if (call == nullptr) continue;
      const auto group = std::ranges::find(groups, *call, [](const auto& entry) { return entry.first; });
      if (group == groups.end()) {
        groups.push_back({*call, {rank}});
      } else {
        group->second.push_back(rank);
      }
    }
    if (groups.size() < 2) continue;
    const auto right = std::ranges::max_element(groups, {}, [](const auto& entry) { return entry.second.size(); });
    const Rank culprit = groups[right == groups.begin() ? 1 : 0].second.front();
    std::rotate(groups.begin(), right, right + 1);
    std::string text;
    for (const auto& [call, ranks] : groups) {
      text += (text.empty() ? "" : ", ") + list_of(ranks) + " called " + describe(call);
    }
    return Verdict{FailureKind::mismatched_call, culprit, sequence,
                   "the ranks called different things as operation " + std::to_string(sequence) + ": " + text};
  }
  if (told == nullptr) return std::nullopt;
  return Verdict{told->kind, told->culprit, told->sequence, told->reason};
}

// A rank that says so itself, to this one or to another that passed it on: its program aborted or ended with an exception.
std::optional<Agreement::Verdict> Agreement::admitted() const {
  const Statement* first = nullptr;
  for (const auto& statement : statements_) {
    if (!statement || statement->origin == kNoRank || statement->origin != statement->culprit) continue;
    if (statement->kind == FailureKind::timeout) continue;
    if (first == nullptr || statement->culprit < first->culprit) first = &*statement;
  }
  if (first == nullptr) return std::nullopt;
  const auto kind = first->culprit == self_ ? FailureKind::transport : FailureKind::peer_failed;
  return Verdict{kind, first->culprit, first->sequence, first->reason};
}

std::optional<Agreement::Verdict> Agreement::damage() const {
  for (const auto& statement : statements_) {
    if (!statement || statement->kind != FailureKind::transport) continue;
    return Verdict{statement->kind, statement->culprit, statement->sequence, statement->reason};
  }
  return std::nullopt;
}

// A rank that could still speak, and named another, has ended in consequence, not as the cause; so may one have that is
// missed only now, when others have been accused: its word may be lost with it.
std::optional<Agreement::Verdict> Agreement::lost() const {
  const auto first = [this](const auto& suspected) {
    for (Rank rank = 0; rank < statements_.size(); ++rank) {
      if (suspected(rank)) return rank;
    }
    return kNoRank;
  };
  const auto names_another = [this](Rank rank) { return heard(rank) && !accuses(statements_[rank], rank); };
  Rank culprit = first([&](Rank rank) { return is_accused(rank) && !names_another(rank); });
  if (culprit == kNoRank) culprit = first([this](Rank rank) { return losses_[rank] && !heard(rank); });
  if (culprit == kNoRank) culprit = first([this](Rank rank) { return losses_[rank] || is_accused(rank); });
  if (culprit == kNoRank) return std::nullopt;
  for (const auto& statement : statements_) {
    if (!accuses(statement, culprit)) continue;
    return Verdict{statement->kind, culprit, statement->sequence, statement->reason};
  }
  const std::uint32_t sequence = statements_[self_] ? statements_[self_]->sequence : 0;
  return Verdict{FailureKind::peer_failed, culprit, sequence, losses_[culprit].value_or("")};
}

// What is left: a time-out, or nothing that makes sense.
Agreement::Verdict Agreement::timed_out() const {
  const Statement* first = nullptr;
  const Statement* any = nullptr;
  for (const auto& statement : statements_) {
    if (!statement) continue;
    if (any == nullptr) any = &*statement;
    if (statement->kind != FailureKind::timeout) continue;
    if (first == nullptr || earlier(*statement, *first)) first = &*statement;
  }
  TELEGRAD_CHECK(any != nullptr);
  if (first == nullptr) return {FailureKind::transport, any->culprit, any->sequence, any->reason};
  std::vector<Rank> absent;
  std::vector<Rank> mute;
  Rank furthest_behind = kNoRank;
  const auto called_by = [this](Rank rank) { return statements_[rank] ? statements_[rank]->called : *left_[rank]; };
  for (Rank rank = 0; rank < statements_.size(); ++rank) {
    if (!statements_[rank] && !left_[rank]) {
      mute.push_back(rank);
    } else if (first->point_to_point) {
      continue;  // nobody else was to call anything
    } else if (const std::uint32_t called = called_by(rank); !precedes(first->sequence, called)) {
      if (absent.empty() || precedes(called, called_by(furthest_behind))) furthest_behind = rank;
      absent.push_back(rank);
    }
  }
  Verdict verdict{first->kind, first->culprit, first->sequence, first->reason};
  if (!absent.empty()) {
    verdict.culprit = furthest_behind;
    verdict.reason += "; " + list_of(absent) + (absent.size() == 1 ? " has" : " have") + " not called it";
    const auto& last = statements_[furthest_behind];
    if (last && !last->calls.empty()) {
      verdict.reason += " (the last call of rank " + std::to_string(furthest_behind) + " was operation " +
                        std::to_string(last->called - 1) + ", " + describe(last->calls.back()) + ")";
    }
  } else if (first->point_to_point) {
    // Its own text names the other rank.
  } else if (mute.empty()) {
    verdict.reason += "; all ranks have called it";
  } else if (verdict.culprit == kNoRank || heard(verdict.culprit)) {
    verdict.culprit = mute.front();
  }
  if (!mute.empty()) verdict.reason += "; no word from " + list_of(mute);
  return verdict;
}

}  // namespace telegrad
