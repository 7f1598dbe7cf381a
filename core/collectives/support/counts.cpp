#include "collectives/support/counts.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "base/buffer.hpp"
#include "base/check.hpp"

namespace telegrad {

static_assert(Counts::kMost * sizeof(std::uint64_t) <= Buffer::kHeadBytes);

Counts::Counts(Transport& net, Step step, std::size_t most) : net_(net), step_(step), most_(most) {
  TELEGRAD_CHECK(most >= 1 && most <= kMost);
  const Rank size = net.size();
  for (Rank distance = 1; distance < size; ++distance) {
    receiving_.emplace_back(net, (net.rank() + size - distance) % size, step, most * sizeof(std::uint64_t));
  }
}

void Counts::say(RankCounts mine) {
  TELEGRAD_CHECK(mine_.empty() && !mine.empty() && mine.size() <= most_);
  mine_ = std::move(mine);
  const Rank size = net_.size();
  for (Rank distance = 1; distance < size; ++distance) {
    sending_.emplace_back(net_, (net_.rank() + distance) % size, step_, std::as_bytes(std::span(mine_)));
  }
}

bool Counts::all_known() const {
  return !mine_.empty() && std::ranges::all_of(receiving_, [](const auto& one) { return one.done(); });
}

Task<std::vector<RankCounts>> Counts::wait() {
  TELEGRAD_CHECK(!mine_.empty());
  const Rank size = net_.size();
  waited_ = true;
  std::vector<RankCounts> counts(size, mine_);
  Rank from = net_.rank();
  for (auto& one : receiving_) {
    from = (from + size - 1) % size;
    const Buffer message = co_await one;
    const std::size_t numbers = message.size() / sizeof(std::uint64_t);
    if (numbers == 0 || numbers * sizeof(std::uint64_t) != message.size()) {
      co_await net_.fail(from, "rank " + std::to_string(from) + " sent counts of " + std::to_string(message.size()) +
                                   " bytes, expected 1 to " + std::to_string(most_) + " times " +
                                   std::to_string(sizeof(std::uint64_t)));
    }
    counts[from].resize(numbers);
    std::memcpy(counts[from].data(), message.data(), message.size());
  }
  co_return counts;
}

Task<void> Counts::finish() {
  if (!waited_) co_await wait();
  for (auto& one : sending_) co_await one;
}

}  // namespace telegrad
