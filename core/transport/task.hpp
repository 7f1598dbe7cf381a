#pragma once
// Task<T>: a lazy coroutine. It runs when awaited and resumes its awaiter by symmetric transfer, so that a chain
// of any length uses constant stack. when_all runs several at once. Nothing here knows of networks or threads.
//
// A suspended Task may be destroyed at any time: its frame owns the frames of the tasks that it awaits.
//
// What a task throws goes to its awaiter, which may never come to it: of tasks under way at once the others may wait for what
// the one that threw was to send. So whoever runs root tasks asks for it too (take_thrown).

#include <coroutine>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.hpp"

namespace telegrad {

template <class T>
class Task;

namespace detail {

inline thread_local std::exception_ptr thrown_here;

inline std::exception_ptr note_thrown() noexcept { return thrown_here = std::current_exception(); }

class TaskPromiseBase {
 public:
  std::suspend_always initial_suspend() noexcept { return {}; }

  struct FinalAwaiter {
    bool await_ready() noexcept { return false; }
    template <class Promise>
    std::coroutine_handle<> await_suspend(std::coroutine_handle<Promise> self) noexcept {
      return self.promise().continuation_;
    }
    void await_resume() noexcept {}
  };
  FinalAwaiter final_suspend() noexcept { return {}; }
  void unhandled_exception() noexcept { error_ = note_thrown(); }
  void continue_with(std::coroutine_handle<> continuation) { continuation_ = continuation; }

 protected:
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::coroutine_handle<> continuation_ = std::noop_coroutine();
  std::exception_ptr error_;
};

template <class T>
class TaskPromise : public TaskPromiseBase {
 public:
  Task<T> get_return_object();
  template <class U>
  void return_value(U&& value) {
    value_.emplace(std::forward<U>(value));
  }
  T take() {
    rethrow();
    return std::move(*value_);
  }

 private:
  std::optional<T> value_;
};

template <>
class TaskPromise<void> : public TaskPromiseBase {
 public:
  Task<void> get_return_object();
  void return_void() noexcept {}
  void take() { rethrow(); }
};

}  // namespace detail

template <class T = void>
class [[nodiscard]] Task {
 public:
  using promise_type = detail::TaskPromise<T>;
  using Handle = std::coroutine_handle<promise_type>;

  Task() = default;
  explicit Task(Handle handle) : handle_(handle) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  struct Awaiter {
    Handle handle;
    bool await_ready() const noexcept { return false; }
    std::coroutine_handle<> await_suspend(std::coroutine_handle<> continuation) noexcept {
      handle.promise().continue_with(continuation);
      return handle;
    }
    T await_resume() { return handle.promise().take(); }
  };
  Awaiter operator co_await() const { return Awaiter{handle_}; }

  /// For whoever runs root tasks: begins the task; it is over when done() says so.
  void start() { handle_.resume(); }
  bool done() const { return handle_ && handle_.done(); }
  /// The root task's value, or its exception; only once it is done().
  T take() { return handle_.promise().take(); }
  /// Resumed when a root task is over, after its last suspension point.
  void continue_with(std::coroutine_handle<> continuation) { handle_.promise().continue_with(continuation); }

 private:
  Handle handle_;
};

namespace detail {

template <class T>
Task<T> TaskPromise<T>::get_return_object() {
  return Task<T>(std::coroutine_handle<TaskPromise<T>>::from_promise(*this));
}
inline Task<void> TaskPromise<void>::get_return_object() {
  return Task<void>(std::coroutine_handle<TaskPromise<void>>::from_promise(*this));
}

// Counts finished children; the last one resumes the parent.
class Join {
 public:
  explicit Join(std::size_t children) : left_(children + 1) {}
  // True if the caller was the last to arrive.
  bool arrive() { return --left_ == 0; }
  std::coroutine_handle<> parent = std::noop_coroutine();

 private:
  std::size_t left_;
};

class JoinedTask {
 public:
  struct promise_type {
    Join* join = nullptr;
    JoinedTask get_return_object() { return JoinedTask(std::coroutine_handle<promise_type>::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    struct FinalAwaiter {
      bool await_ready() noexcept { return false; }
      std::coroutine_handle<> await_suspend(std::coroutine_handle<promise_type> self) noexcept {
        Join& join = *self.promise().join;
        return join.arrive() ? join.parent : std::noop_coroutine();
      }
      void await_resume() noexcept {}
    };
    FinalAwaiter final_suspend() noexcept { return {}; }
    void return_void() noexcept {}
    void unhandled_exception() noexcept { error = note_thrown(); }
    std::exception_ptr error;
  };

  explicit JoinedTask(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  JoinedTask(JoinedTask&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  JoinedTask& operator=(JoinedTask&&) = delete;
  ~JoinedTask() {
    if (handle_) handle_.destroy();
  }
  void start(Join& join) {
    handle_.promise().join = &join;
    handle_.resume();
  }
  void rethrow() const {
    if (handle_.promise().error) std::rethrow_exception(handle_.promise().error);
  }

 private:
  std::coroutine_handle<promise_type> handle_;
};

inline JoinedTask join_task(Task<void> task) { co_await task; }

class WhenAll {
 public:
  explicit WhenAll(std::vector<Task<void>> tasks) : join_(tasks.size()) {
    children_.reserve(tasks.size());
    for (auto& task : tasks) children_.push_back(join_task(std::move(task)));
  }
  WhenAll(const WhenAll&) = delete;
  WhenAll& operator=(const WhenAll&) = delete;

  bool await_ready() const noexcept { return children_.empty(); }
  bool await_suspend(std::coroutine_handle<> parent) {
    join_.parent = parent;
    for (auto& child : children_) child.start(join_);
    return !join_.arrive();
  }
  void await_resume() const {
    for (const auto& child : children_) child.rethrow();
  }

 private:
  Join join_;
  std::vector<JoinedTask> children_;
};

}  // namespace detail

/// The last exception that a task has thrown in this thread since this was asked before; null if none has.
inline std::exception_ptr take_thrown() noexcept { return std::exchange(detail::thrown_here, nullptr); }

/// A task that is under way from the moment that this is made, as a message is; it must be awaited, and never moves.
class TaskUnderWay {
 public:
  explicit TaskUnderWay(Task<void> task) : task_(std::move(task)) { task_.start(); }
  TaskUnderWay(const TaskUnderWay&) = delete;
  TaskUnderWay& operator=(const TaskUnderWay&) = delete;

  struct Awaiter {
    Task<void>* task;
    bool await_ready() const noexcept { return task->done(); }
    void await_suspend(std::coroutine_handle<> waiter) const noexcept { task->continue_with(waiter); }
    void await_resume() const { task->take(); }
  };
  Awaiter operator co_await() noexcept { return {&task_}; }

 private:
  Task<void> task_;
};

/// Runs the tasks at once and returns when all are over; throws the first task's exception in argument order.
inline Task<void> when_all(std::vector<Task<void>> tasks) {
  detail::WhenAll all(std::move(tasks));
  co_await all;
}

}  // namespace telegrad
