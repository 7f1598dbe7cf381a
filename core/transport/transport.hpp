#pragma once
// All that a collective may know of the world: who it is, how many there are, and how to move bytes and spend work.
// It must not know which network carries a message (but whether it is memory), what time it is, or which thread it runs on.

#include <algorithm>
#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/ending.hpp"
#include "base/types.hpp"
#include "transport/task.hpp"

namespace telegrad {

/// Coroutines that may go on. Drivers only push; whoever runs the session drains.
class ReadyQueue {
 public:
  void push(std::coroutine_handle<> coroutine) { ready_.push_back(coroutine); }
  bool empty() const { return ready_.empty(); }
  void swap(std::vector<std::coroutine_handle<>>& other) { ready_.swap(other); }
  void clear() { ready_.clear(); }
  /// The network holds no Pending any more.
  void network_is_gone() { network_is_gone_ = true; }
  bool is_network_gone() const { return network_is_gone_; }

 private:
  std::vector<std::coroutine_handle<>> ready_;
  bool network_is_gone_ = false;
};

/// One send, receive or slice of work under way. It lives in a coroutine's frame and never moves: the network holds
/// its address until complete().
class Pending {
 public:
  explicit Pending(ReadyQueue& ready) : ready_(&ready) {}
  /// Only memory running out can unwind a collective with messages under way; the network would write into freed
  /// memory then, so the process ends instead.
  ~Pending() {
    if (!done_ && std::uncaught_exceptions() > 0 && !ready_->is_network_gone()) {
      end_process("out of memory in a collective with messages under way");
    }
  }
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  void complete(std::size_t bytes) {
    bytes_ = bytes;
    done_ = true;
    if (waiter_) ready_->push(std::exchange(waiter_, {}));
  }
  bool done() const { return done_; }
  std::size_t bytes() const { return bytes_; }
  /// Resumes `waiter` from the queue: once done, or at the next turn if it is done already.
  void wait(std::coroutine_handle<> waiter) {
    if (done_) {
      ready_->push(waiter);
    } else {
      waiter_ = waiter;
    }
  }

 private:
  ReadyQueue* ready_;
  std::coroutine_handle<> waiter_;
  std::size_t bytes_ = 0;
  bool done_ = false;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual Rank rank() const = 0;
  virtual Rank size() const = 0;
  /// All ranks live on one host, and messages between them go through its memory. The same on all ranks.
  virtual bool shares_memory() const = 0;

  // The awaitables below are under way from the moment they are made, so that several can be; each must be awaited.
  // co_await goes through a separate awaiter: GCC 12 would copy an awaitable that is an array element.
  class Sending : public Pending {
   public:
    Sending(Transport& net, Rank to, Step step, ConstBytes bytes) : Pending(net.ready()) {
      net.start_send(to, step, bytes, *this);
    }
    struct Awaiter {
      Pending* pending;
      bool await_ready() const noexcept { return pending->done(); }
      void await_suspend(std::coroutine_handle<> waiter) const { pending->wait(waiter); }
      void await_resume() const noexcept {}
    };
    Awaiter operator co_await() noexcept { return {this}; }
  };

  class Receiving : public Pending {
   public:
    Receiving(Transport& net, Rank from, Step step, Bytes into) : Pending(net.ready()) {
      net.start_receive(from, step, into, *this);
    }
    struct Awaiter {
      Pending* pending;
      bool await_ready() const noexcept { return pending->done(); }
      void await_suspend(std::coroutine_handle<> waiter) const { pending->wait(waiter); }
      std::size_t await_resume() const noexcept { return pending->bytes(); }
    };
    Awaiter operator co_await() noexcept { return {this}; }
  };

  class ReceivingAny : public Pending {
   public:
    ReceivingAny(Transport& net, Rank from, Step step, std::size_t most_bytes) : Pending(net.ready()) {
      net.start_receive_any(from, step, most_bytes, buffer_, *this);
    }
    struct Awaiter {
      ReceivingAny* pending;
      bool await_ready() const noexcept { return pending->done(); }
      void await_suspend(std::coroutine_handle<> waiter) const { pending->wait(waiter); }
      Buffer await_resume() const noexcept { return std::move(pending->buffer_); }
    };
    Awaiter operator co_await() noexcept { return {this}; }

   private:
    Buffer buffer_;
  };

  class Computing : public Pending {
   public:
    Computing(Transport& net, std::size_t bytes) : Pending(net.ready()) { net.start_compute(bytes, *this); }
    struct Awaiter {
      Pending* pending;
      // Work that is worth a turn of the network gives it one, also where its time has already passed.
      bool await_ready() const noexcept { return pending->done() && pending->bytes() < kTurnBytes; }
      void await_suspend(std::coroutine_handle<> waiter) const { pending->wait(waiter); }
      void await_resume() const noexcept {}
    };
    Awaiter operator co_await() noexcept { return {this}; }
  };

  /// Ends the operation for every rank; the awaiting coroutine never goes on.
  /// The network's own reduction over all ranks: see Driver::reduce().
  class Reducing : public Pending {
   public:
    Reducing(Transport& net, std::uint64_t turn, DType dtype, Reduction reduction, Buffer& values) : Pending(net.ready()) {
      net.start_reduce(turn, dtype, reduction, values, *this);
    }
    Sending::Awaiter operator co_await() noexcept { return {this}; }
  };

  class Failing {
   public:
    Failing(Transport& net, Rank culprit, std::string reason)
        : net_(net), culprit_(culprit), reason_(std::move(reason)) {}
    bool await_ready() const noexcept { return false; }
    void await_suspend(std::coroutine_handle<>) { net_.start_fail(culprit_, std::move(reason_)); }
    void await_resume() const noexcept {}

   private:
    Transport& net_;
    Rank culprit_;
    std::string reason_;
  };

  /// `bytes` stay untouched until the awaitable is done. No pair of ranks uses a step twice within an operation.
  Sending send(Rank to, Step step, ConstBytes bytes) { return {*this, to, step, bytes}; }
  /// A message of exactly `into.size()` bytes; any other length ends the operation with an error.
  Receiving receive(Rank from, Step step, Bytes into) { return {*this, from, step, into}; }
  /// A message of a length that only its sender knows, up to `most_bytes`, in a pooled buffer.
  ReceivingAny receive_any_size(Rank from, Step step, std::size_t most_bytes) {
    return {*this, from, step, most_bytes};
  }
  /// Runs `work`, which touches about `bytes` bytes (at most kSliceBytes), then lets the network have a turn.
  template <class Work>
  Computing compute(std::size_t bytes, Work&& work) {
    if (runs_work()) work();
    return {*this, bytes};
  }
  /// Of the next reduce_by_network(): operations take it as they begin, in the same order on all ranks.
  virtual std::uint64_t take_turn() { return 0; }
  /// values = the reduction of all ranks' `values`, which none gives up before it is done. Only where
  /// AllreduceTable::has_network_sums().
  Reducing reduce_by_network(std::uint64_t turn, DType dtype, Reduction reduction, Buffer& values) {
    return {*this, turn, dtype, reduction, values};
  }
  Failing fail(Rank culprit, std::string reason) { return {*this, culprit, std::move(reason)}; }

  static constexpr std::size_t kSliceBytes = std::size_t{256} << 10;
  static constexpr std::size_t kTurnBytes = std::size_t{32} << 10;

  virtual ReadyQueue& ready() = 0;

  /// Bytes of this operation's messages until now, headers of vectors included: for reports, not to decide by.
  struct MovedBytes {
    std::uint64_t sent = 0;
    std::uint64_t received = 0;
  };
  virtual MovedBytes moved() const = 0;

 protected:
  friend class GroupTransport;  // passes on what it is asked for
  virtual void start_send(Rank to, Step step, ConstBytes bytes, Pending& pending) = 0;
  virtual void start_receive(Rank from, Step step, Bytes into, Pending& pending) = 0;
  virtual void start_receive_any(Rank from, Step step, std::size_t most_bytes, Buffer& into, Pending& pending) = 0;
  virtual void start_compute(std::size_t bytes, Pending& pending) = 0;
  virtual void start_fail(Rank culprit, std::string reason) = 0;
  virtual void start_reduce(std::uint64_t, DType, Reduction, Buffer&, Pending&) {}
  virtual bool runs_work() const { return true; }
};

/// `work(begin, end)` over [0, count) in slices of at most Transport::kSliceBytes.
template <class Work>
Task<void> compute_slices(Transport& net, std::size_t count, std::size_t element_bytes, Work work) {
  const std::size_t slice = std::max<std::size_t>(1, Transport::kSliceBytes / element_bytes);
  for (std::size_t begin = 0; begin < count; begin += slice) {
    const std::size_t end = std::min(count, begin + slice);
    co_await net.compute((end - begin) * element_bytes, [&] { work(begin, end); });
  }
}

}  // namespace telegrad
