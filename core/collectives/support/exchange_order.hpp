#pragma once
// In which order a rank exchanges messages with each of the others.

#include <bit>

#include "base/types.hpp"

namespace telegrad {

/// Rounds 1 … P − 1. Of a power of two ranks, two exchange with each other: who is late delays one rank, in both directions,
/// and every port has one sender at a time. Of others, everybody sends to the rank `round` ahead.
class ExchangeOrder {
 public:
  ExchangeOrder(Rank rank, Rank size) : rank_(rank), size_(size) {}

  Rank receiver(Rank round) const { return pairs() ? rank_ ^ round : (rank_ + round) % size_; }
  Rank sender(Rank round) const { return pairs() ? rank_ ^ round : (rank_ + size_ - round) % size_; }

 private:
  bool pairs() const { return std::has_single_bit(size_); }

  Rank rank_;
  Rank size_;
};

}  // namespace telegrad
