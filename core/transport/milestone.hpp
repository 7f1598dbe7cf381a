#pragma once
// Milestone: one coroutine of an operation waits until another has come so far.

#include <coroutine>
#include <cstddef>
#include <utility>

#include "base/check.hpp"
#include "transport/transport.hpp"

namespace telegrad {

class Milestone {
 public:
  explicit Milestone(ReadyQueue& ready) : ready_(ready) {}
  Milestone(const Milestone&) = delete;
  Milestone& operator=(const Milestone&) = delete;

  void reach(std::size_t milestone) {
    reached_ = milestone;
    if (waiter_ && reached_ >= wanted_) ready_.push(std::exchange(waiter_, {}));
  }

  struct Awaiter {
    Milestone& self;
    std::size_t wanted;
    bool await_ready() const noexcept { return self.reached_ >= wanted; }
    void await_suspend(std::coroutine_handle<> waiter) const {
      TELEGRAD_CHECK(!self.waiter_);
      self.wanted_ = wanted;
      self.waiter_ = waiter;
    }
    void await_resume() const noexcept {}
  };
  /// Only one coroutine waits at a time.
  Awaiter until(std::size_t milestone) { return {*this, milestone}; }

 private:
  ReadyQueue& ready_;
  std::size_t reached_ = 0;
  std::size_t wanted_ = 0;
  std::coroutine_handle<> waiter_;
};

}  // namespace telegrad
