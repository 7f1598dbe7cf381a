// Who is to be blamed for a trouble: the rules of docs/reference/errors.md, written down a second time.
#include <algorithm>
#include <optional>

#include "simulation/explorer/judge.hpp"

namespace telegrad::explorer {
namespace {

// The lowest rank of `ranks` outside the largest group that called alike; of two groups of one size, that of the lowest rank
// is taken for right. Nobody, if all called alike.
std::optional<Rank> odd_one_out(const Program& program, std::uint32_t at, const std::vector<Rank>& ranks) {
  std::vector<std::vector<Rank>> groups;
  for (const Rank rank : ranks) {
    const auto alike = [&](const auto& group) {
      return program.calls[rank][at].agrees(program.calls[group.front()][at], program.size);
    };
    const auto group = std::ranges::find_if(groups, alike);
    if (group == groups.end()) {
      groups.push_back({rank});
    } else {
      group->push_back(rank);
    }
  }
  std::size_t right = 0;
  for (std::size_t i = 1; i < groups.size(); ++i) {
    if (groups[i].size() > groups[right].size()) right = i;
  }
  if (groups.size() < 2) return std::nullopt;
  return groups[right == 0 ? 1 : 0].front();
}

// Ranks that differ wait for those that have not come to the operation, but not where one that had called something else,
// and was through with it, has said goodbye: that stops all sessions at once. Whether others have heard of a call made then
// depends on what had stopped its rank: not where the call was refused at once, perhaps where it never began.
bool was_refused(const SeenCall& call) { return call.failure && call.done_s <= call.called_s; }
bool has_begun(const SeenCall& call) { return call.began_s < kNever_s; }

Blame of_mismatch(const Program& program, const Seen& seen) {
  const auto at = first_difference(program);
  if (!at) return {};
  Blame blame;
  std::vector<Rank> all;
  std::vector<Rank> not_refused;
  std::vector<Rank> begun;
  for (Rank rank = 0; rank < program.size; ++rank) {
    if (program.calls[rank].size() <= *at) {
      blame.culprits.push_back(rank);  // never calls it
      continue;
    }
    const SeenCall& call = seen.ranks[rank].calls[*at];
    all.push_back(rank);
    if (!was_refused(call)) not_refused.push_back(rank);
    if (has_begun(call)) begun.push_back(rank);
  }
  if (blame.culprits.empty()) {
    blame.kinds = {FailureKind::mismatched_call};
    blame.culprits.push_back(*odd_one_out(program, *at, all));
    if (!program.parts) return blame;
    for (const auto& ranks : {not_refused, begun}) {
      if (const auto odd = odd_one_out(program, *at, ranks)) blame.culprits.push_back(*odd);
    }
    return blame;
  }
  // It says goodbye, or time runs out. Whose goodbye is heard first is chance's where several leave.
  blame.kinds = {FailureKind::timeout};
  if (program.parts) blame.kinds.push_back(FailureKind::peer_failed);
  return blame;
}

Blame of_damage(const Program& program) {
  Blame blame{.culprits = {program.culprit}, .kinds = {FailureKind::transport}};
  switch (program.trouble) {
    case Trouble::other_call: blame.kinds = {FailureKind::mismatched_call}; break;
    // Nobody can know whose message is missing, nor that one that came under a false name is not genuine: the rank that
    // misses it waits for it until time is up.
    case Trouble::other_step:
    case Trouble::other_source:
      blame.anybody = true;
      blame.kinds = {FailureKind::transport, FailureKind::timeout};
      break;
    default: break;
  }
  return blame;
}

}  // namespace

Blame blame_of(const Program& program, const Seen& seen) {
  const Rank culprit = program.culprit;
  switch (program.trouble) {
    case Trouble::none:
    case Trouble::slow_link:
    case Trouble::slow_rank:
    case Trouble::hold:
    case Trouble::pause:
    case Trouble::stray: return {};
    case Trouble::kill:
      if (!seen.ranks[culprit].died) return {};
      return {.culprits = {culprit}, .kinds = {FailureKind::peer_failed}};
    case Trouble::freeze:
      if (!seen.ranks[culprit].frozen) return {};
      // Peers lose patience long before operations do, as draw() chooses the two.
      return {.culprits = {culprit},
              .kinds = {program.session.liveness_timeout_s ? FailureKind::peer_failed : FailureKind::timeout}};
    case Trouble::thaw:
    case Trouble::close:
      return {.culprits = {culprit}, .kinds = {FailureKind::peer_failed}, .exempt = culprit};
    case Trouble::abort:
      return {.culprits = {culprit}, .kinds = {FailureKind::peer_failed}, .exempt = culprit};
    default: return is_damage(program.trouble) ? of_damage(program) : of_mismatch(program, seen);
  }
}

}  // namespace telegrad::explorer
