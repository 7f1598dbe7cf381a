#pragma once
// The last operations of a session, as a flight recorder keeps them: for reports, and to compare late messages with.

#include <array>
#include <cstdint>

#include "transport/envelope.hpp"

namespace telegrad {

enum class OperationState : std::uint8_t { running, completed, failed };

class History {
 public:
  static constexpr std::uint32_t kLength = 64;

  struct Entry {
    std::uint32_t sequence = 0;
    OperationState state = OperationState::running;
    bool used = false;
    Call call{};
    double called_s = 0.0;
    double ended_s = 0.0;  // unless running
  };

  void called(std::uint32_t sequence, const Call& call, double now_s) {
    at(sequence) = {.sequence = sequence, .used = true, .call = call, .called_s = now_s};
  }
  void ended(std::uint32_t sequence, OperationState state, double now_s) {
    Entry& entry = at(sequence);
    if (!entry.used || entry.sequence != sequence) return;  // overwritten: more than kLength were in flight
    entry.state = state;
    entry.ended_s = now_s;
  }
  /// Null if it is not among the last.
  const Entry* find(std::uint32_t sequence) const {
    const Entry& entry = entries_[sequence % kLength];
    return entry.used && entry.sequence == sequence ? &entry : nullptr;
  }

 private:
  Entry& at(std::uint32_t sequence) { return entries_[sequence % kLength]; }

  std::array<Entry, kLength> entries_{};
};

}  // namespace telegrad
