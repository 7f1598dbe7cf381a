#pragma once
// What went wrong in the world, as data: it travels between threads and ranks; the caller's thread throws it.

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/types.hpp"
#include "transport/envelope.hpp"

namespace telegrad {

enum class FailureKind : std::uint8_t { transport = 1, peer_failed = 2, timeout = 3, mismatched_call = 4 };

struct Failure {
  FailureKind kind = FailureKind::transport;
  Rank rank = kNoRank;  // who reports
  Rank peer = kNoRank;  // the culprit, or kNoRank
  std::string host{};   // where the culprit lives; empty: unknown
  std::uint32_t pid = 0;
  std::string operation{};
  std::uint32_t sequence = 0;
  std::optional<std::uint32_t> tag{};  // of a send or receive: then `sequence` is how many operations came before it
  std::string reason{};

  std::string message() const;
};

/// The failure as that of one operation, begun as number `sequence`.
Failure named(Failure failure, const Call& call, std::uint32_t sequence);

class TransportError : public std::runtime_error {
 public:
  explicit TransportError(Failure failure) : std::runtime_error(failure.message()), failure_(std::move(failure)) {}
  const Failure& failure() const { return failure_; }

 private:
  Failure failure_;
};

}  // namespace telegrad
