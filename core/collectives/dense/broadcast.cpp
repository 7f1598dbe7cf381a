// Binomial tree: ceil(log2 P) (α + n·β). Thakur, Rabenseifner, Gropp, "Optimization of collective communication
// operations in MPICH", Int. J. High Performance Computing Applications 19(1), 2005, §4.2.
//
// Long vectors go along a chain instead. In the tree, seen from the root, rank v hears from v without its lowest set
// bit, and tells v + 2^i for all 2^i below that bit.
#include "collectives/dense/broadcast.hpp"

#include <bit>
#include <deque>

#include "collectives/dense/broadcast_chain.hpp"

namespace telegrad {
namespace {

// Messages from here on fill the link alone: sending them one after another lets the largest subtree begin first.
constexpr std::size_t kBulkBytes = std::size_t{64} << 10;

Task<void> broadcast_tree(Transport& net, Rank root, Bytes data) {
  const Rank size = net.size();
  const Rank self = (net.rank() + size - root) % size;
  const auto rank_of = [&](Rank v) { return (v + root) % size; };

  Rank reach = std::bit_ceil(size);  // ranks [self, self + reach) hear through us
  if (self != 0) {
    reach = self & (~self + 1);
    co_await net.receive(rank_of(self - reach), 0, data);
  }
  std::deque<Transport::Sending> sends;
  for (Rank distance = reach / 2; distance > 0; distance /= 2) {
    if (self + distance >= size) continue;
    sends.emplace_back(net, rank_of(self + distance), Step{0}, data);
    if (data.size() >= kBulkBytes) co_await sends.back();
  }
  for (auto& sending : sends) co_await sending;
}

}  // namespace

Task<void> broadcast(Transport& net, Rank root, Bytes data) {
  return broadcast_goes_by_chain(net.size(), net.shares_memory(), data.size()) ? broadcast_chain(net, root, data)
                                                         : broadcast_tree(net, root, data);
}

}  // namespace telegrad
