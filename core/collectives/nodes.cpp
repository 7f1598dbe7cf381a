#include "collectives/nodes.hpp"

#include <algorithm>
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
}

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
