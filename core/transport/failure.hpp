#pragma once
// What went wrong in the world, as data: it travels between threads and ranks; the caller's thread throws it.

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/types.hpp"
#include "transport/envelope.hpp"

namespace telegrad {

enum class FailureKind : std::uint8_t { transport = 1, peer_failed = 2, timeout = 3, mismatched_call = 4 };

/// Of a communicator that was split from another: what errors call it, and its ranks' numbers in that one, its parent.
struct Group {
  std::string name{};
  std::vector<Rank> parent_ranks{};  // by rank

  /// Which ranks of the parent its ranks are: all of them where they are few, else `rank` and `peer` (kNoRank: none).
  std::string ranks_text(Rank rank, Rank peer) const;

  /// Whether each rank here has the same number in the parent.
  bool numbers_as_parent() const;
};

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
  std::shared_ptr<const Group> group{};  // null: the communicator was not split from another

  std::string message() const;
  /// What its parent calls a rank of the group; kNoRank without one.
  Rank in_parent(Rank of_group) const;
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
