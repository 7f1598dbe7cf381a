#include "collectives/support/pieces.hpp"

#include <utility>

#include "base/check.hpp"
#include "collectives/support/blocks.hpp"

namespace telegrad {

PieceExchange::PieceExchange(Transport& net, std::size_t pieces,
                             std::function<void(PieceExchange&, std::size_t piece)> begin)
    : net_(net), pieces_(pieces), begin_(std::move(begin)) {
  while (begun_ < pieces_ && begun_ < kPiecesUnderWay) begin_piece();
}

void PieceExchange::receive(Rank from, Step step, Bytes into) {
  receiving_.emplace_back(net_, from, step, into);
  ++of_piece_.back();
}

void PieceExchange::begin_piece() {
  of_piece_.push_back(0);
  begin_(*this, begun_++);
}

Task<void> PieceExchange::take() {
  TELEGRAD_CHECK(!of_piece_.empty());
  for (std::uint8_t left = of_piece_.front(); left > 0; --left) {
    co_await receiving_.front();
    receiving_.pop_front();
  }
  of_piece_.pop_front();
  while (!sending_.empty() && sending_.front().done()) sending_.pop_front();
  if (begun_ < pieces_) begin_piece();
}

Task<void> PieceExchange::finish() {
  TELEGRAD_CHECK(of_piece_.empty() && begun_ == pieces_);
  for (auto& one : sending_) co_await one;
}

Task<void> exchange_in_pieces(Transport& net, Rank to, ConstBytes leaving, Rank from, Bytes coming, std::size_t pieces,
                              Step first_step) {
  TELEGRAD_CHECK(leaving.size() == coming.size());
  PieceExchange exchange(net, pieces, [&](PieceExchange& messages, std::size_t piece) {
    const Range part = part_of({0, leaving.size()}, pieces, piece);
    const Step step = first_step + static_cast<Step>(piece);
    messages.receive(from, step, coming.subspan(part.begin, part.size()));
    messages.send(to, step, leaving.subspan(part.begin, part.size()));
  });
  for (std::size_t piece = 0; piece < pieces; ++piece) co_await exchange.take();
  co_await exchange.finish();
}

}  // namespace telegrad
