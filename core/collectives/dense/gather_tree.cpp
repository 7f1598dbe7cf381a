// Binomial gather: ceil(log2 P)·α + (P−1)·n·β. Thakur, Rabenseifner, Gropp, "Optimization of collective communication
// operations in MPICH", Int. J. High Performance Computing Applications 19(1), 2005, §4.
//
// Each rank collects the blocks of its subtrees behind its own, and sends all of them up.
#include "collectives/dense/gather_tree.hpp"

#include <deque>

#include "collectives/support/elements.hpp"
#include "collectives/support/rooted_tree.hpp"

namespace telegrad {

Task<void> gather_tree(Transport& net, Rank root, ConstBytes mine, Bytes all) {
  const RootedTree tree(net.rank(), root, net.size());
  const std::size_t block = mine.size();
  if (tree.reach() == 1) {
    co_await net.send(tree.rank_of(tree.parent()), 0, mine);
    co_return;
  }
  const Buffer scratch(tree.reach() * block);
  std::deque<Transport::Receiving> receives;
  for (Rank distance = 1; distance < tree.span(); distance *= 2) {
    const Rank below = tree.reach_of_child(distance);
    if (below == 0) break;
    receives.emplace_back(net, tree.rank_of(tree.self + distance), Step{0},
                          scratch.bytes().subspan(distance * block, below * block));
  }
  co_await copy(net, mine, scratch.bytes().first(block));
  for (auto& receiving : receives) co_await receiving;
  if (tree.self != 0) {
    co_await net.send(tree.rank_of(tree.parent()), 0, scratch.bytes());
    co_return;
  }
  const std::size_t behind = (net.size() - root) * block;  // the blocks of the ranks from the root on
  co_await copy(net, scratch.bytes().first(behind), all.subspan(root * block));
  co_await copy(net, scratch.bytes().subspan(behind), all.first(root * block));
}

}  // namespace telegrad
