#pragma once
// Long messages cut in pieces, a few of which are under way at once in each direction: one is begun for each that has come.
// So ranks send no faster than they receive, and what has been sent never piles up before a port: over TCP with BBR
// messages that do are many times slower. What a piece is, this must not know.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>

#include "base/types.hpp"
#include "transport/task.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Of this length, with its header a message still fits the 64 KiB that Linux hands to a network card at once: of a little
/// more a small packet is left over, and often comes late where two ranks send to each other.
inline constexpr std::size_t kCardBytes = std::size_t{60} << 10;
/// Within a host, long pieces are copied once and short ones twice.
inline constexpr std::size_t kMemoryPieceBytes = std::size_t{1} << 20;
/// More would overlap more; but what two ranks send to each other at once gets in its own way.
inline constexpr std::size_t kPiecesUnderWay = 3;

/// How long pieces are on this network; the same on all ranks.
inline std::size_t piece_bytes(const Transport& net) {
  return net.shares_memory() ? kMemoryPieceBytes : kCardBytes;
}
/// In how many pieces `bytes` go.
inline std::size_t pieces_of(const Transport& net, std::size_t bytes) {
  return bytes == 0 ? 1 : (bytes - 1) / piece_bytes(net) + 1;
}

class PieceExchange {
 public:
  /// `begin` makes the messages of a piece by send() and receive(). Those of the first few are made at once.
  PieceExchange(Transport& net, std::size_t pieces, std::function<void(PieceExchange&, std::size_t piece)> begin);

  void send(Rank to, Step step, ConstBytes bytes) { sending_.emplace_back(net_, to, step, bytes); }
  void receive(Rank from, Step step, Bytes into);

  /// Done when the next piece has come; another one is begun then.
  Task<void> take();
  /// Done when all that was sent may be written again. Every piece must have been taken.
  Task<void> finish();

 private:
  void begin_piece();

  Transport& net_;
  const std::size_t pieces_;
  const std::function<void(PieceExchange&, std::size_t)> begin_;
  std::size_t begun_ = 0;
  std::deque<Transport::Sending> sending_;
  std::deque<Transport::Receiving> receiving_;
  std::deque<std::uint8_t> of_piece_;  // how many messages each of those under way receives
};

/// `leaving` to one rank, while `coming`, which is as long, comes from another; in so many pieces, which both of them know.
/// Uses as many steps from `first_step` on.
Task<void> exchange_in_pieces(Transport& net, Rank to, ConstBytes leaving, Rank from, Bytes coming, std::size_t pieces,
                              Step first_step);

}  // namespace telegrad
