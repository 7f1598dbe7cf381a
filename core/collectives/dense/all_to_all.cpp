// Pairwise exchange: in round t every rank sends to the one t ahead and receives from the one t before: (P−1)(α + n·β) one
// after the other, less where rounds overlap. Thakur, Rabenseifner, Gropp, "Optimization of collective communication
// operations in MPICH", Int. J. High Performance Computing Applications 19(1), 2005, §4.4.
//
// Blocks that are alike and long go round by round, in pieces: where two senders share a receiver's port TCP loses up to
// four fifths of it. Blocks that differ go whole, since only the length of a message tells that two ranks disagree on it.
//
// Nothing is received before a barrier has told that all ranks have called; the first messages leave beside it. Ranks may
// have different numbers of messages under way: the earliest round that is not over anywhere is under way on both its ends.
#include "collectives/dense/all_to_all.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "collectives/dense/all_to_all_bruck.hpp"
#include "collectives/dense/barrier.hpp"
#include "collectives/support/elements.hpp"
#include "collectives/support/pieces.hpp"
#include "transport/window.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kUnderWayMost = 16;
constexpr std::size_t kUnderWayLeast = 2;
constexpr std::size_t kUnderWayBytes = std::size_t{512} << 10;  // about, where that are enough messages
constexpr Step kBarrierSteps = 32;                              // those of the exchange come after them
constexpr std::size_t kOverlapBytesMost = std::size_t{32} << 10;  // of blocks whose rounds overlap
constexpr std::size_t kPiecesMost = kExchangeBlocksSteps;         // about, of all blocks together

// From so many ranks on, and up to so many bytes in a block, copying blocks at every step is cheaper than P−1 messages.
constexpr Rank kBruckRanksLeast = 16;
constexpr std::size_t kBruckBytesMost = 512;

std::size_t under_way(const Partition& blocks) {
  const std::size_t average = blocks.count() / blocks.blocks();
  return std::clamp(kUnderWayBytes / std::max<std::size_t>(1, average), kUnderWayLeast, kUnderWayMost);
}

struct Exchange {
  Transport& net;
  ConstBytes input;
  Bytes output;
  Partition sent;
  Partition received;
  Step first_step;

  ConstBytes leaving(Rank to) const { return input.subspan(sent[to].begin, sent[to].size()); }
  Bytes coming(Rank from) const { return output.subspan(received[from].begin, received[from].size()); }
};

Task<void> send_all(Exchange& exchange) {
  Transport& net = exchange.net;
  const std::size_t most = under_way(exchange.sent);
  Window<Transport::Sending, kUnderWayMost> sends;
  std::size_t count = 0;
  for (Rank ahead = 1; ahead < net.size(); ++ahead, ++count) {
    if (count >= most) {
      co_await sends.front();
      sends.pop_front();
    }
    const Rank to = (net.rank() + ahead) % net.size();
    sends.emplace_back(net, to, exchange.first_step, exchange.leaving(to));
  }
  for (; !sends.empty(); sends.pop_front()) co_await sends.front();
}

Task<void> receive_all(Exchange& exchange) {
  Transport& net = exchange.net;
  const std::size_t most = under_way(exchange.received);
  Window<Transport::Receiving, kUnderWayMost> receives;
  std::size_t count = 0;
  for (Rank before = 1; before < net.size(); ++before, ++count) {
    if (count >= most) {
      co_await receives.front();
      receives.pop_front();
    }
    const Rank from = (net.rank() + net.size() - before) % net.size();
    receives.emplace_back(net, from, exchange.first_step, exchange.coming(from));
  }
  for (; !receives.empty(); receives.pop_front()) co_await receives.front();
}

Task<void> copy_own(Exchange& exchange) {
  const Rank rank = exchange.net.rank();
  co_await copy(exchange.net, exchange.leaving(rank), exchange.coming(rank));
}

Task<void> receive_when_all_have_called(Exchange& exchange) {
  if (exchange.net.size() == 2) {  // the one message tells
    co_await receive_all(exchange);
    co_await copy_own(exchange);
    co_return;
  }
  co_await barrier(exchange.net);
  std::vector<Task<void>> both;
  both.push_back(receive_all(exchange));
  both.push_back(copy_own(exchange));
  co_await when_all(std::move(both));
}

Task<void> run_round(Exchange& exchange, Rank ahead) {
  Transport& net = exchange.net;
  const Rank to = (net.rank() + ahead) % net.size();
  const Rank from = (net.rank() + net.size() - ahead) % net.size();
  const ConstBytes leaving = exchange.leaving(to);
  const Bytes coming = exchange.coming(from);
  const std::size_t pieces = std::min(pieces_of(net, leaving.size()), std::max(kPiecesMost / net.size(), std::size_t{1}));
  return exchange_in_pieces(net, to, leaving, from, coming, pieces, exchange.first_step);
}

Task<void> run_rounds(Exchange& exchange) {
  for (Rank ahead = 1; ahead < exchange.net.size(); ++ahead) co_await run_round(exchange, ahead);
}

Task<void> exchange_in_rounds(Transport& net, ConstBytes input, Bytes output, Partition blocks) {
  Exchange exchange{net, input, output, blocks, blocks, kBarrierSteps};
  if (net.size() == 2) {  // the messages tell
    co_await run_rounds(exchange);
    co_await copy_own(exchange);
    co_return;
  }
  co_await barrier(net);
  std::vector<Task<void>> both;
  both.push_back(run_rounds(exchange));
  both.push_back(copy_own(exchange));
  co_await when_all(std::move(both));
}

Task<void> exchange_directly(Transport& net, ConstBytes input, Bytes output, Partition sent, Partition received) {
  Exchange exchange{net, input, output, std::move(sent), std::move(received), kBarrierSteps};
  std::vector<Task<void>> both;
  both.push_back(receive_when_all_have_called(exchange));
  both.push_back(send_all(exchange));
  co_await when_all(std::move(both));
}

}  // namespace

Task<void> exchange_blocks(Transport& net, ConstBytes input, Bytes output, Step first_step) {
  const Rank size = net.size();
  TELEGRAD_CHECK(input.size() == output.size() && input.size() % size == 0);
  const Partition blocks(input.size(), size);
  Exchange exchange{net, input, output, blocks, blocks, first_step};
  if (input.size() > size * kOverlapBytesMost) {
    co_await run_rounds(exchange);
    co_return;
  }
  std::vector<Task<void>> both;
  both.push_back(receive_all(exchange));
  both.push_back(send_all(exchange));
  co_await when_all(std::move(both));
}

Task<void> all_to_all(Transport& net, ConstBytes input, Bytes output) {
  const Rank size = net.size();
  TELEGRAD_CHECK(input.size() == output.size() && input.size() % size == 0);
  if (size >= kBruckRanksLeast && input.size() <= size * kBruckBytesMost) return all_to_all_bruck(net, input, output);
  const Partition blocks(input.size(), size);
  if (input.size() > size * kOverlapBytesMost) return exchange_in_rounds(net, input, output, blocks);
  return exchange_directly(net, input, output, blocks, blocks);
}

Task<void> all_to_all_v(Transport& net, ConstBytes input, Bytes output, Partition sent, Partition received) {
  TELEGRAD_CHECK(sent.blocks() == net.size() && input.size() == sent.count());
  TELEGRAD_CHECK(received.blocks() == net.size() && output.size() == received.count());
  return exchange_directly(net, input, output, std::move(sent), std::move(received));
}

}  // namespace telegrad
