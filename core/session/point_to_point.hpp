#pragma once
// The messages that one rank sends another outside the operations that all ranks call. They are numbered per pair of
// ranks, brought back into that order on arrival, since a network may let one overtake another, and matched in it with
// the receives of their tag, of those that fit with the one that was called first. What a failure is, this must not know.

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/driver.hpp"

namespace telegrad {

class PointToPoint {
 public:
  struct Receive {
    Call call{};  // its root is whose message it takes, or kNoRank: anybody's
    Bytes into{};
    Pending* pending = nullptr;
    Rank* source = nullptr;  // is told whose message it got
  };
  struct Met {
    Arrival arrival{};
    Receive receive{};
  };
  enum class Taken : std::uint8_t { yes, twice, from_afar };

  /// The number of the next message to `to`.
  std::uint32_t next_number(Rank to) { return pairs_[to].sent++; }
  std::uint32_t sent_to(Rank to) const { return pair(to).sent; }
  /// How many messages of `source` have come, without a gap.
  std::uint32_t come_from(Rank source) const { return pair(source).come; }

  /// Bytes of memory that the messages take which have come and are not received.
  std::size_t memory() const { return memory_; }

  /// A message is here; next() follows until it is empty. What is not taken is still the caller's.
  Taken take(const Arrival& arrival);
  /// The next message of `source` that a receive waits for; those before it are kept for receives to come.
  std::optional<Met> next(Rank source);
  /// The message for `receive`, if it has come, of several ranks' the one that came first; otherwise the receive waits.
  std::optional<Arrival> post(const Receive& receive);

  /// A receive that waits for a message of `source`, or with kNoRank of anybody: that of the lowest tag, the oldest.
  const Receive* waiting_for(Rank source) const;
  /// How many there are.
  std::size_t count_waiting_for(Rank source) const;
  /// The oldest message of `source` that no receive waits for.
  const Arrival* unclaimed(Rank source) const;
  /// Gives the messages that no receive waits for to `discard`.
  template <class Discard>
  void discard_unclaimed(Discard discard) {
    for (auto at = queues_.begin(); at != queues_.end();) {
      while (!at->second.arrivals.empty()) discard(leave(at->second.arrivals.pop().value));
      at = at->second.empty() ? queues_.erase(at) : std::next(at);
    }
  }
  /// Forgets all that waits, and gives every message that was not received to `discard`.
  template <class Discard>
  void clear(Discard discard) {
    discard_unclaimed(discard);
    queues_.clear();
    for (auto& [peer, pair] : pairs_) {
      for (auto& [number, arrival] : std::exchange(pair.ahead, {})) discard(leave(arrival));
    }
  }

 private:
  template <class Value>
  class Queue {
   public:
    bool empty() const { return first_ == values_.size(); }
    std::size_t size() const { return values_.size() - first_; }
    const Value& front() const { return values_[first_]; }
    void push(const Value& value) { values_.push_back(value); }
    Value pop() {
      Value value = values_[first_++];
      if (2 * first_ > values_.size()) {
        values_.erase(values_.begin(), values_.begin() + static_cast<std::ptrdiff_t>(first_));
        first_ = 0;
      }
      return value;
    }

   private:
    std::vector<Value> values_;
    std::size_t first_ = 0;  // those before it are gone
  };
  template <class Value>
  struct Numbered {
    Value value{};
    std::uint64_t number = 0;  // in the order in which they came, or were called
  };
  struct Queues {  // of one source and tag; one of them is empty
    Queue<Numbered<Arrival>> arrivals;
    Queue<Numbered<Receive>> receives;
    bool empty() const { return arrivals.empty() && receives.empty(); }
  };
  struct Pair {
    std::uint32_t sent = 0;
    std::uint32_t come = 0;
    std::unordered_map<std::uint32_t, Arrival> ahead{};  // by number: those before them are still on their way
  };
  using Key = std::pair<Rank, Step>;  // source and tag
  using Place = std::map<Key, Queues>::iterator;

  std::optional<Met> match(const Arrival& arrival);
  const Arrival& leave(const Arrival& arrival) {
    memory_ -= arrival.memory();
    return arrival;
  }
  /// The queues of `step` whose first message came before all others'; the end if none has one.
  Place first_come(Step step);
  void drop_if_empty(Place at) {
    if (at->second.empty()) queues_.erase(at);
  }
  const Pair& pair(Rank peer) const {
    static const Pair nothing_yet;
    const auto found = pairs_.find(peer);
    return found == pairs_.end() ? nothing_yet : found->second;
  }

  std::unordered_map<Rank, Pair> pairs_;  // with those that it has had to do with
  std::map<Key, Queues> queues_;  // none is empty
  std::uint64_t numbered_ = 0;
  std::size_t memory_ = 0;
};

}  // namespace telegrad
