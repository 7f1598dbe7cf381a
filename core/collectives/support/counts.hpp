#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "transport/task.hpp"
#include "transport/transport.hpp"

namespace telegrad {

using RankCounts = std::vector<std::uint64_t>;

/// Some numbers of every rank, on their way to all others while other messages are. For few ranks: one message goes from each
/// to each, at `step`.
class Counts {
 public:
  /// Where messages are of sizes only, so many of their numbers are there.
  static constexpr std::size_t kMost = 6;

  /// A rank may have 1 to `most` numbers (at most kMost: CHECKed).
  Counts(Transport& net, Step step, std::size_t most);

  /// This rank's. Once, before wait() and finish().
  void say(RankCounts mine);
  /// Of this rank, too.
  bool all_known() const;
  /// By rank; done when all are known. Once, before finish().
  Task<std::vector<RankCounts>> wait();
  /// Done when this object may go.
  Task<void> finish();

 private:
  Transport& net_;
  const Step step_;
  const std::size_t most_;
  RankCounts mine_;
  bool waited_ = false;
  std::deque<Transport::ReceivingAny> receiving_;  // which also bring what they say where messages are of size only
  std::deque<Transport::Sending> sending_;
};

}  // namespace telegrad
