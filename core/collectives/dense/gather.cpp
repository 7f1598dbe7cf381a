// Direct gather: α + (P−1)·n·β. Everybody sends to the root, whose port is never idle; it has a few receives under way, so
// that thousands of ranks cost it little memory. Empty blocks are sent too: so everybody's call is compared with the root's.
#include "collectives/dense/gather.hpp"

#include <utility>

#include "base/check.hpp"
#include "collectives/dense/gather_tree.hpp"
#include "collectives/support/elements.hpp"
#include "collectives/support/rooted_tree.hpp"
#include "transport/window.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kUnderWay = 16;

Task<void> gather_directly(Transport& net, Rank root, ConstBytes mine, Bytes all, Partition blocks) {
  if (net.rank() != root) {
    co_await net.send(root, 0, mine);
    co_return;
  }
  const auto block = [&](Rank rank) { return all.subspan(blocks[rank].begin, blocks[rank].size()); };
  Window<Transport::Receiving, kUnderWay> receives;
  for (Rank ahead = 1; ahead < net.size(); ++ahead) {
    if (receives.full()) {
      co_await receives.front();
      receives.pop_front();
    }
    const Rank source = (root + ahead) % net.size();
    receives.emplace_back(net, source, Step{0}, block(source));
  }
  co_await copy(net, mine, block(root));
  for (; !receives.empty(); receives.pop_front()) co_await receives.front();
}

}  // namespace

Task<void> gather(Transport& net, Rank root, ConstBytes mine, Bytes all, Partition blocks) {
  TELEGRAD_CHECK(blocks.blocks() == net.size() && mine.size() == blocks[net.rank()].size());
  TELEGRAD_CHECK(net.rank() != root || all.size() == blocks.count());
  if (RootedTree::suits(net.size(), blocks)) return gather_tree(net, root, mine, all);
  return gather_directly(net, root, mine, all, std::move(blocks));
}

}  // namespace telegrad
