#include "collectives/support/nodes.hpp"

#include <algorithm>
#include <bit>
#include <unordered_map>

#include "base/check.hpp"
#include "base/random.hpp"

namespace telegrad {

Nodes::Nodes(std::span<const std::uint32_t> labels, bool inside_shares_memory)
    : inside_shares_memory_(inside_shares_memory) {
  TELEGRAD_CHECK(!labels.empty());
  std::unordered_map<std::uint32_t, Rank> numbers;
  for (Rank rank = 0; rank < labels.size(); ++rank) {
    const auto [found, fresh] = numbers.try_emplace(labels[rank], count());
    if (fresh) members_.emplace_back();
    const Rank node = found->second;
    node_of_.push_back(node);
    place_of_.push_back(static_cast<Rank>(members_[node].size()));
    members_[node].push_back(rank);
    digest_ = mix(digest_ + node + 1);
  }
  if (digest_ == 0) digest_ = 1;
  slices_ = static_cast<Rank>(std::ranges::min(members_, {}, [](const auto& node) { return node.size(); }).size());

  std::vector<Rank> left(members_.size(), 0);
  for (Rank rank = 0; rank < ranks(); ++rank) left[node_of_[rank]] += live_together(rank, (rank + 1) % ranks()) ? 0 : 1;
  for (Rank node = 0; node < count(); ++node) {
    leaving_ = std::max(leaving_, static_cast<double>(left[node]) / static_cast<double>(members_[node].size()));
  }
  const auto stays_inside = [&](unsigned round) {
    for (Rank rank = 0; rank < ranks(); ++rank) {
      if (!live_together(rank, rank ^ (Rank{1} << round))) return false;
    }
    return true;
  };
  const unsigned rounds = std::has_single_bit(ranks()) ? static_cast<unsigned>(std::countr_zero(ranks())) : 0;
  while (rounds_inside_ < rounds && stays_inside(rounds_inside_)) ++rounds_inside_;
}

bool Nodes::live_together(Rank a, Rank b) const { return node_of_[a] == node_of_[b]; }

std::vector<Rank> Nodes::owners(Rank slice) const {
  TELEGRAD_CHECK(slice < slices_);
  std::vector<Rank> owners;
  for (const auto& node : members_) owners.push_back(node[slice]);
  return owners;
}

std::vector<std::uint64_t> Nodes::lengths(Rank node, std::size_t whole) const {
  std::vector<std::uint64_t> lengths(members_[node].size(), 0);
  for (Rank slice = 0; slice < slices_; ++slice) lengths[slice] = part_of({0, whole}, slices_, slice).size();
  return lengths;
}

}  // namespace telegrad
