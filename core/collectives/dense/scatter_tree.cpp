// Binomial scatter: ceil(log2 P)·α + (P−1)·n·β. Thakur, Rabenseifner, Gropp, "Optimization of collective communication
// operations in MPICH", Int. J. High Performance Computing Applications 19(1), 2005, §4.2.
//
// Each rank gets the blocks of its subtree, its own the first of them, and passes on the others, the largest subtree first.
#include "collectives/dense/scatter_tree.hpp"

#include <deque>

#include "collectives/support/elements.hpp"
#include "collectives/support/rooted_tree.hpp"

namespace telegrad {

Task<void> scatter_tree(Transport& net, Rank root, ConstBytes all, Bytes mine) {
  const RootedTree tree(net.rank(), root, net.size());
  const std::size_t block = mine.size();
  if (tree.reach() == 1) {
    co_await net.receive(tree.rank_of(tree.parent()), 0, mine);
    co_return;
  }
  const Buffer scratch(tree.reach() * block);
  if (tree.self == 0) {
    const std::size_t behind = (net.size() - root) * block;  // the blocks of the ranks from the root on
    co_await copy(net, all.subspan(root * block), scratch.bytes().first(behind));
    co_await copy(net, all.first(root * block), scratch.bytes().subspan(behind));
  } else {
    co_await net.receive(tree.rank_of(tree.parent()), 0, scratch.bytes());
  }
  std::deque<Transport::Sending> sends;
  for (Rank distance = tree.span() / 2; distance > 0; distance /= 2) {
    const Rank below = tree.reach_of_child(distance);
    if (below == 0) continue;
    sends.emplace_back(net, tree.rank_of(tree.self + distance), Step{0},
                       scratch.bytes().subspan(distance * block, below * block));
  }
  co_await copy(net, scratch.bytes().first(block), mine);
  for (auto& sending : sends) co_await sending;
}

}  // namespace telegrad
