#pragma once
// Which ranks live together: nodes, inside of which messages are cheaper than between them. How nodes are found, this
// must not know.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/types.hpp"
#include "collectives/support/blocks.hpp"

namespace telegrad {

/// A partition of the ranks, the same on all of them. Nodes are numbered in the order of their first ranks, and a node's
/// ranks have places in the order of ranks.
///
/// The smallest node's number of ranks is the number of slices into which a vector is cut: in every node the rank of
/// place s owns slice s, and what is beyond that number owns none. So each slice has one owner in every node, however
/// unlike the nodes are; where a node has but one rank, first ranks own everything.
class Nodes {
 public:
  /// `labels`: of each rank; who has the same is in the same node. `inside_shares_memory`: see Transport::shares_memory(),
  /// of this rank's node.
  explicit Nodes(std::span<const std::uint32_t> labels, bool inside_shares_memory = false);

  Rank ranks() const { return static_cast<Rank>(node_of_.size()); }
  Rank count() const { return static_cast<Rank>(members_.size()); }
  Rank slices() const { return slices_; }
  /// There is something to gain: neither are all ranks in one node, nor is every rank alone in its own.
  bool two_level() const { return count() > 1 && count() < ranks(); }
  /// Every node has as many ranks.
  bool alike() const { return count() * slices() == ranks(); }

  Rank node_of(Rank rank) const { return node_of_[rank]; }
  Rank place_of(Rank rank) const { return place_of_[rank]; }
  const std::vector<Rank>& members(Rank node) const { return members_[node]; }
  bool inside_shares_memory() const { return inside_shares_memory_; }
  /// The owners of `slice`, by node.
  std::vector<Rank> owners(Rank slice) const;
  /// The share of a node's ranks whose neighbour to the right in a ring of all ranks lives on another, where that is most.
  double leaving() const { return leaving_; }
  /// In so many first rounds of recursive doubling all partners live together. 0 among ranks that are no power of two.
  unsigned rounds_inside() const { return rounds_inside_; }
  /// Of every rank of `node` the length of its part of `whole` elements: none of who owns no slice.
  std::vector<std::uint64_t> lengths(Rank node, std::size_t whole) const;
  /// Never 0; it differs, but for bad luck, where partitions differ.
  std::uint64_t digest() const { return digest_; }

 private:
  bool live_together(Rank a, Rank b) const;

  std::vector<Rank> node_of_;
  std::vector<Rank> place_of_;
  std::vector<std::vector<Rank>> members_;
  Rank slices_ = 0;
  std::uint64_t digest_ = 0;
  double leaving_ = 0.0;
  unsigned rounds_inside_ = 0;
  bool inside_shares_memory_;
};

}  // namespace telegrad
