// Direct scatter: α + (P−1)·n·β. The root sends everybody its block, a few at a time. Empty blocks are sent too: so
// everybody's call is compared with the root's.
#include "collectives/dense/scatter.hpp"

#include <utility>

#include "base/check.hpp"
#include "collectives/dense/scatter_tree.hpp"
#include "collectives/support/elements.hpp"
#include "collectives/support/rooted_tree.hpp"
#include "transport/window.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kUnderWay = 16;

Task<void> scatter_directly(Transport& net, Rank root, ConstBytes all, Bytes mine, Partition blocks) {
  if (net.rank() != root) {
    co_await net.receive(root, 0, mine);
    co_return;
  }
  const auto block = [&](Rank rank) { return all.subspan(blocks[rank].begin, blocks[rank].size()); };
  Window<Transport::Sending, kUnderWay> sends;
  for (Rank ahead = 1; ahead < net.size(); ++ahead) {
    if (sends.full()) {
      co_await sends.front();
      sends.pop_front();
    }
    const Rank to = (root + ahead) % net.size();
    sends.emplace_back(net, to, Step{0}, block(to));
  }
  co_await copy(net, block(root), mine);
  for (; !sends.empty(); sends.pop_front()) co_await sends.front();
}

}  // namespace

Task<void> scatter(Transport& net, Rank root, ConstBytes all, Bytes mine, Partition blocks) {
  TELEGRAD_CHECK(blocks.blocks() == net.size() && mine.size() == blocks[net.rank()].size());
  TELEGRAD_CHECK(net.rank() != root || all.size() == blocks.count());
  if (RootedTree::suits(net.size(), blocks)) return scatter_tree(net, root, all, mine);
  return scatter_directly(net, root, all, mine, std::move(blocks));
}

}  // namespace telegrad
