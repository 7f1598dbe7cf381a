#include "collectives/counts.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

namespace telegrad {

Counts::Counts(Transport& net, Step step, std::uint64_t mine) : net_(net), mine_(mine) {
  const Rank size = net.size();
  for (Rank distance = 1; distance < size; ++distance) {
    receiving_.emplace_back(net, (net.rank() + size - distance) % size, step, sizeof mine_);
    sending_.emplace_back(net, (net.rank() + distance) % size, step, std::as_bytes(std::span(&mine_, 1)));
  }
}

bool Counts::all_known() const {
  return std::ranges::all_of(receiving_, [](const auto& one) { return one.done(); });
}

Task<std::vector<std::uint64_t>> Counts::wait() {
  const Rank size = net_.size();
  waited_ = true;
  std::vector<std::uint64_t> counts(size, mine_);
  Rank from = net_.rank();
  for (auto& one : receiving_) {
    from = (from + size - 1) % size;
    const Buffer message = co_await one;
    if (message.size() != sizeof mine_) {
      co_await net_.fail(from, "rank " + std::to_string(from) + " sent a count of " + std::to_string(message.size()) +
                                   " bytes, expected " + std::to_string(sizeof mine_));
    }
    std::memcpy(&counts[from], message.data(), sizeof mine_);
  }
  co_return counts;
}

Task<void> Counts::finish() {
  if (!waited_) co_await wait();
  for (auto& one : sending_) co_await one;
}

}  // namespace telegrad
