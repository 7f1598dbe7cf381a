// Who is to be blamed for a trouble: the rules of docs/errors.md, written down a second time.
#include <algorithm>

#include "simulation/explorer/judge.hpp"

namespace telegrad::explorer {
namespace {

// The lowest rank outside the largest group that called alike; of two groups of one size, that of the lowest rank is
// taken for right.
Rank odd_one_out(const Program& program, std::uint32_t at) {
  std::vector<std::vector<Rank>> groups;
  for (Rank rank = 0; rank < program.size; ++rank) {
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
  return groups[right == 0 ? 1 : 0].front();
}

Blame of_mismatch(const Program& program) {
  const auto at = first_difference(program);
  if (!at) return {};
  Blame blame;
  for (Rank rank = 0; rank < program.size; ++rank) {
    if (program.calls[rank].size() <= *at) blame.culprits.push_back(rank);  // never calls it
  }
  if (blame.culprits.empty()) {
    return {.culprits = {odd_one_out(program, *at)}, .kinds = {FailureKind::mismatched_call}};
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
    default: return is_damage(program.trouble) ? of_damage(program) : of_mismatch(program);
  }
}

}  // namespace telegrad::explorer
