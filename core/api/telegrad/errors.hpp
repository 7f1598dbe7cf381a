#pragma once
// What can go wrong in the world: a peer, the network. Misuse is a std::invalid_argument, thrown before anything is sent.

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "base/types.hpp"

namespace telegrad::api {

/// The network or a peer failed; the communicator can only be closed afterwards.
class TransportError : public std::runtime_error {
 public:
  struct Facts {
    Rank rank = kNoRank;                // who reports
    std::optional<Rank> peer{};         // the culprit, the same on all survivors; empty: unknown
    std::string host{};                 // the culprit's machine; empty: unknown
    std::string operation{};            // what was running
    std::optional<std::uint32_t> tag{}; // its number on this communicator; of a send or recv the message's tag
  };

  TransportError(const std::string& message, Facts facts) : std::runtime_error(message), facts_(std::move(facts)) {}

  Rank rank() const { return facts_.rank; }
  std::optional<Rank> peer() const { return facts_.peer; }
  const std::string& host() const { return facts_.host; }
  const std::string& operation() const { return facts_.operation; }
  std::optional<std::uint32_t> tag() const { return facts_.tag; }

 private:
  Facts facts_;
};

/// A peer died, left or aborted.
class PeerFailed : public TransportError {
 public:
  using TransportError::TransportError;
};

/// Something did not happen in time.
class TimeoutExpired : public TransportError {
 public:
  using TransportError::TransportError;
};

/// Ranks called different operations, or the same one with different counts, types or options.
class MismatchedCall : public TransportError {
 public:
  using TransportError::TransportError;
};

}  // namespace telegrad::api
