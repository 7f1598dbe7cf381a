#include "transport/failure.hpp"

namespace telegrad {

std::string Group::ranks_text(Rank rank, Rank peer) const {
  constexpr std::size_t kAllMost = 8;
  std::vector<Rank> told;
  for (Rank one = 0; one < parent_ranks.size(); ++one) {
    if (parent_ranks.size() <= kAllMost || one == rank || one == peer) told.push_back(one);
  }
  std::string here, there;
  for (const Rank one : told) {
    if (!here.empty()) {
      here += ", ";
      there += ", ";
    }
    here += std::to_string(one);
    there += std::to_string(parent_ranks[one]);
  }
  return told.size() == 1 ? "rank " + here + " here is rank " + there + " of its parent"
                          : "ranks " + here + " here are ranks " + there + " of its parent";
}

bool Group::numbers_as_parent() const {
  for (Rank one = 0; one < parent_ranks.size(); ++one) {
    if (parent_ranks[one] != one) return false;
  }
  return true;
}

Rank Failure::in_parent(Rank of_group) const {
  return group && of_group < group->parent_ranks.size() ? group->parent_ranks[of_group] : kNoRank;
}

std::string Failure::message() const {
  const bool joined = rank != kNoRank;  // before that nothing has a number
  std::string text = joined ? "rank " + std::to_string(rank) + ": " : "";
  if (!operation.empty()) {
    text += operation + (tag || !joined ? ": " : " (operation " + std::to_string(sequence) + "): ");
  }
  text += reason;
  if (peer != kNoRank) {
    text += " [peer: rank " + std::to_string(peer);
    if (!host.empty()) text += " on host " + host + ", process " + std::to_string(pid);
    text += "]";
  }
  if (group) {
    text += " [" + group->name;
    if (!group->numbers_as_parent()) text += ": " + group->ranks_text(rank, peer);
    text += "]";
  }
  return text;
}

Failure named(Failure failure, const Call& call, std::uint32_t sequence) {
  failure.operation = describe(call);
  failure.sequence = sequence;
  failure.tag.reset();
  if (is_point_to_point(call)) failure.tag = static_cast<std::uint32_t>(call.layout);
  return failure;
}

}  // namespace telegrad
