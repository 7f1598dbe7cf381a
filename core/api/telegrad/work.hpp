#pragma once
// Work: an operation that has begun. The memory it was given must stay until wait() has returned; if that throws
// TransportError, until the communicator is closed. What was moved from throws std::invalid_argument whatever is called; it
// may be destroyed and assigned to.

#include <functional>
#include <memory>
#include <optional>

#include "base/types.hpp"
#include "telegrad/errors.hpp"

namespace telegrad::api {

namespace detail {
struct Begun;  // the library's own request
}

class [[nodiscard]] Work {
 public:
  /// For the library's own use.
  explicit Work(std::shared_ptr<detail::Begun> begun) : begun_(std::move(begun)) {}

  /// Blocks until the operation is over; throws what it failed with: TransportError and its kinds.
  void wait() const;
  /// The same for at most so many seconds, then TimeoutExpired: the operation goes on, and may be waited for again. Throws
  /// std::invalid_argument unless the time is positive.
  void wait(double timeout_s) const;
  /// True once it is over, also when it failed.
  bool is_completed() const;
  /// Whose message a recv() or sendrecv() got; empty until it is over, and of everything else.
  std::optional<Rank> source() const;

 private:
  /// Throws std::invalid_argument.
  const detail::Begun& begun() const;

  std::shared_ptr<detail::Begun> begun_;  // null: moved from
};

/// A Work that makes something new.
template <class T>
class [[nodiscard]] Result : public Work {
 public:
  /// For the library's own use.
  Result(std::shared_ptr<detail::Begun> begun, std::function<T()> made) : Work(std::move(begun)), made_(std::move(made)) {}

  /// Waits, as wait() does; may be called again, and gives the same then.
  T result() const {
    wait();
    return made_();
  }

 private:
  std::function<T()> made_;
};

}  // namespace telegrad::api
