#pragma once
// What sums of sparse vectors learn from earlier ones of their kind, so that a run repeated learns the same: a sum takes what
// one saw that was called a fixed number of calls before it, and waits for it, whichever others in flight are over sooner.
// Which algorithms there are, this must not know.

#include <atomic>
#include <coroutine>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "transport/transport.hpp"

namespace telegrad {

/// Shares of a vector's entries that all others have too: see overlap_of().
struct Overlaps {
  double ranks = 0.0;  // of all ranks' vectors
  double nodes = 0.0;  // of sums that nodes have made of a slice
};

class ObservedSums;

/// One sum's. Made on the caller's thread, in the order of calls; all else is for whoever runs the sum.
class SumObservation {
 public:
  /// Taken from no other sum.
  explicit SumObservation(const Overlaps& expected) : sum_(std::make_shared<Sum>()) { sum_->overlaps = expected; }
  /// Of a sum that never ran: it keeps no later one waiting, and none of those before it.
  ~SumObservation();
  SumObservation(const SumObservation&) = delete;
  SumObservation& operator=(const SumObservation&) = delete;

  class Beginning;
  /// Awaited before expected() is asked for.
  Beginning begin(ReadyQueue& ready);
  const Overlaps& expected() const { return sum_->overlaps; }
  /// What is not seen stays as it was expected.
  void saw_ranks(double overlap) { seen_.ranks = overlap; }
  void saw_nodes(double overlap) { seen_.nodes = overlap; }
  /// Later sums may know it. Once, after begin().
  void end();

 private:
  friend class ObservedSums;

  // Outlives the observation while later sums need it. Who made it links its basis, all else is the runner's.
  struct Sum {
    std::shared_ptr<Sum> basis;  // null: of no other sum, or taken, or never to be
    Overlaps overlaps;
    std::atomic<bool> over = false;
    std::vector<Beginning*> waiting;
  };

  void take_basis();

  std::shared_ptr<Sum> sum_;
  Overlaps seen_;
};

class SumObservation::Beginning {
 public:
  Beginning(SumObservation& observation, ReadyQueue& ready) : observation_(observation), ready_(ready) {}
  /// A failed operation's coroutines go without having been resumed.
  ~Beginning();
  Beginning(const Beginning&) = delete;
  Beginning& operator=(const Beginning&) = delete;

  bool await_ready() const noexcept;
  void await_suspend(std::coroutine_handle<> waiter);
  void await_resume() { observation_.take_basis(); }

 private:
  friend class SumObservation;

  SumObservation& observation_;
  ReadyQueue& ready_;
  std::coroutine_handle<> waiter_;
};

/// The sums of one kind, in the order of calls.
class ObservedSums {
 public:
  explicit ObservedSums(const Overlaps& first) : first_(first) {}
  std::shared_ptr<SumObservation> next();

 private:
  Overlaps first_;
  std::uint64_t called_ = 0;
  std::deque<std::shared_ptr<SumObservation::Sum>> latest_;
};

}  // namespace telegrad
