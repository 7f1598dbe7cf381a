#include "collectives/pieces.hpp"

#include <utility>

#include "base/check.hpp"

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

}  // namespace telegrad
