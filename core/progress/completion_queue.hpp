#pragma once
// CompletionQueue: where requests report that they are done, so that one thread of another language can hear of many
// requests without the engine ever waiting for that language's lock.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "session/request.hpp"

namespace telegrad {

class CompletionQueue {
 public:
  /// `token` comes out of next() once the request is done. The queue must outlive the request's operation.
  void watch(Request& request, std::uint64_t token) {
    request.when_done([this, token] { push(token); });
  }
  /// All tokens that are finished, at least one unless the time is over or the queue is closed. Blocks.
  std::vector<std::uint64_t> next(std::chrono::duration<double> timeout) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, timeout, [this] { return closed_ || !tokens_.empty(); });
    return std::exchange(tokens_, {});
  }
  void close() {
    {
      const std::scoped_lock lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }

 private:
  void push(std::uint64_t token) {
    // Notifies with the lock held: who gets the token may destroy the queue at once.
    const std::scoped_lock lock(mutex_);
    tokens_.push_back(token);
    changed_.notify_one();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::uint64_t> tokens_;
  bool closed_ = false;
};

}  // namespace telegrad
