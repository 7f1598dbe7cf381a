#pragma once
// Request: one operation as its caller sees it. Made on the caller's thread, run on the engine's, waited for on any.

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "session/gate.hpp"
#include "transport/envelope.hpp"
#include "transport/failure.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Call::purpose of the collectives that this thread calls; messages between two ranks have none.
inline thread_local std::uint32_t purpose_of_calls = 0;

class Request {
 public:
  using Body = std::function<Task<void>(Transport&)>;

  /// `body` starts the collective; what it captures (scratch, vectors) lives as long as the Request.
  Request(Call call, Body body) : call_(call), body_(std::move(body)) {
    if (!is_point_to_point(call)) call_.purpose = purpose_of_calls;
  }

  /// Before it is handed over: it begins once the gate is open, and the gate's done word is written once it is over.
  void set_gate(const Gate& gate) { gate_ = gate; }
  /// Null: it has none.
  const Gate* gate() const { return gate_ ? &*gate_ : nullptr; }

  const Call& call() const { return call_; }
  bool done() const { return done_.load(std::memory_order_acquire); }
  /// Only once done(); empty if it succeeded.
  const std::optional<Failure>& failure() const { return failure_; }
  /// Only once done(); throws TransportError if it failed.
  void rethrow() const {
    if (failure_) throw TransportError(*failure_);
  }

  struct Begun {
    std::uint32_t sequence = 0;
    double when_s = 0.0;
  };
  /// For the engine's side, when the operation gets its number.
  void note_begun(Begun begun) { begun_ = begun; }
  /// Only once done(); empty if it never had a number.
  const std::optional<Begun>& begun() const { return begun_; }
  /// For the engine's side, before finish(), when the operation has succeeded: by the clock of Begun.
  void note_ended(double when_s) { ended_s_ = when_s; }
  /// Only once done(); empty if it failed.
  const std::optional<double>& ended_s() const { return ended_s_; }
  /// For the engine's side, before finish(): whose message a receive got.
  void note_source(Rank source) { source_ = source; }
  /// Only once done(); empty if it failed, or is no receive.
  const std::optional<Rank>& source() const { return source_; }
  /// For the engine's side: runs on its thread once the request is over, before anybody can see done().
  void finish(std::optional<Failure> failure) {
    failure_ = std::move(failure);
    if (gate_ && failure_) gate_->spoil();
    std::vector<std::function<void()>> callbacks;
    {
      const std::scoped_lock lock(mutex_);
      done_.store(true, std::memory_order_release);
      callbacks.swap(callbacks_);
    }
    if (gate_) gate_->release();  // who is let go by it finds the request done
    for (const auto& callback : callbacks) callback();
  }
  /// Calls back once, at once if the request is done already, otherwise on the engine's thread: the callback must be
  /// short, must not throw and must not wait.
  void when_done(std::function<void()> callback) {
    {
      const std::scoped_lock lock(mutex_);
      if (!done()) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback();
  }
  Task<void> start(Transport& net) const { return body_(net); }

 private:
  Call call_;
  Body body_;
  std::optional<Gate> gate_;
  std::optional<Begun> begun_;
  std::optional<double> ended_s_;
  std::optional<Rank> source_;
  std::mutex mutex_;
  std::vector<std::function<void()>> callbacks_;  // mutex_
  std::optional<Failure> failure_;
  std::atomic<bool> done_ = false;
};

using RequestPtr = std::shared_ptr<Request>;

}  // namespace telegrad
