// Pipelined chain: n·β + (P−2)(α + b·β) for pieces of b bytes. Each rank passes on to the next, counted from the root, what
// has come from the one before. Pjesivac-Grbovic, Angskun, Bosilca, Fagg, Gabriel, Dongarra, "Performance analysis of MPI
// collective operations", Cluster Computing 10(2), 2007, §3.
#include "collectives/dense/broadcast_chain.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>
#include <vector>

#include "collectives/support/blocks.hpp"
#include "collectives/support/pieces.hpp"
#include "transport/milestone.hpp"
#include "transport/window.hpp"

namespace telegrad {
namespace {

// So many bytes take as long as a message's latency, α/β: 10 µs at 1 GB/s. It shifts only where the ways cross, and how
// long pieces are, and there costs are flat.
constexpr double kLatencyBytes = 10'000.0;
constexpr std::size_t kLongBytes = std::size_t{64} << 10;
constexpr std::size_t kLeastPieceBytes = std::size_t{16} << 10;
constexpr std::size_t kMostMemoryPieceBytes = std::size_t{256} << 10;  // over a network those that fit a card
constexpr std::size_t kUnderWay = 4;  // pieces, in each direction: they hide the latency also of short ones

// The best length is √(n·(α/β)/(P−2)): shorter pieces leave the first rank earlier, longer ones cost fewer latencies.
std::size_t pieces_of(Rank size, bool shares_memory, std::size_t bytes) {
  const double best = std::sqrt(static_cast<double>(bytes) * kLatencyBytes / std::max(1.0, static_cast<double>(size) - 2.0));
  const std::size_t most = shares_memory ? kMostMemoryPieceBytes : kCardBytes;
  const std::size_t piece = std::clamp(static_cast<std::size_t>(best), kLeastPieceBytes, most);
  return (bytes + piece - 1) / piece;
}

struct Chain {
  Transport& net;
  Rank root;
  Bytes data;
  std::size_t pieces;
  Milestone arrived;

  Bytes piece(std::size_t index) const {
    const Range range = part_of({0, data.size()}, pieces, index);
    return data.subspan(range.begin, range.size());
  }
  Rank neighbour(Rank ahead) const { return (net.rank() + ahead) % net.size(); }
};

Task<void> take(Chain& chain) {
  const Rank before = chain.neighbour(chain.net.size() - 1);
  Window<Transport::Receiving, kUnderWay> receives;
  std::size_t posted = 0;
  for (std::size_t arrived = 0; arrived < chain.pieces;) {
    for (; posted < chain.pieces && !receives.full(); ++posted) {
      receives.emplace_back(chain.net, before, static_cast<Step>(posted), chain.piece(posted));
    }
    co_await receives.front();
    receives.pop_front();
    chain.arrived.reach(++arrived);
  }
}

Task<void> pass_on(Chain& chain) {
  const Rank behind = chain.neighbour(1);
  Window<Transport::Sending, kUnderWay> sends;
  for (std::size_t index = 0; index < chain.pieces; ++index) {
    if (chain.net.rank() != chain.root) co_await chain.arrived.until(index + 1);
    if (sends.full()) {
      co_await sends.front();
      sends.pop_front();
    }
    sends.emplace_back(chain.net, behind, static_cast<Step>(index), chain.piece(index));
  }
  for (; !sends.empty(); sends.pop_front()) co_await sends.front();
}

}  // namespace

bool broadcast_goes_by_chain(Rank size, bool shares_memory, std::size_t bytes) {
  if (size < 3 || bytes < kLongBytes) return false;
  const double whole = static_cast<double>(bytes);
  const double piece = whole / static_cast<double>(pieces_of(size, shares_memory, bytes));
  const double chain = kLatencyBytes + whole + (static_cast<double>(size) - 2.0) * (kLatencyBytes + piece);
  const double tree = static_cast<double>(std::bit_width(size - 1)) * (kLatencyBytes + whole);
  return chain < tree;
}

Task<void> broadcast_chain(Transport& net, Rank root, Bytes data) {
  Chain chain{net, root, data, pieces_of(net.size(), net.shares_memory(), data.size()), Milestone(net.ready())};
  std::vector<Task<void>> both;
  if (net.rank() != root) both.push_back(take(chain));
  if ((net.rank() + 1) % net.size() != root) both.push_back(pass_on(chain));
  co_await when_all(std::move(both));
}

}  // namespace telegrad
