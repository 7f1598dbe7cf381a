#pragma once
// Agreement: how the survivors of a failure come to name the same culprit. Each rank that stops tells all others what
// it knows, once; the verdict depends on what was said alone, not on the order in which it was heard.
// It must not know of time or networks: Session decides how long to listen.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transport/envelope.hpp"
#include "transport/failure.hpp"

namespace telegrad {

// Sequence numbers wrap around.
inline bool precedes(std::uint32_t sequence, std::uint32_t other) {
  return static_cast<std::int32_t>(sequence - other) < 0;
}

// Nobody can be so many operations or messages ahead of another rank, since operations wait before (kAheadLeast): what says
// so is damage.
inline constexpr std::uint32_t kAheadMost = std::uint32_t{1} << 20;

/// What a rank says when it stops: the failure that it found itself, or that it heard of first.
struct Statement {
  FailureKind kind = FailureKind::transport;
  Rank origin = kNoRank;  // who found it
  Rank culprit = kNoRank;
  bool culprit_speaks = false;  // it has left, and can still say something itself
  bool point_to_point = false;  // between two ranks, before operation `sequence`
  std::uint32_t sequence = 0;  // of the operation that failed
  std::string reason{};
  std::uint32_t called = 0;      // operations that this rank has called so far
  std::uint32_t first_call = 0;  // the sequence number of calls[0]
  std::vector<Call> calls{};     // what it called, around the failure
};

class Agreement {
 public:
  Agreement(Rank size, Rank self) : self_(self), statements_(size), losses_(size), left_(size) {}

  /// Only the first statement of a rank counts.
  void add(Rank rank, Statement statement);
  /// `rank` cannot say anything any more.
  void lose(Rank rank, std::string reason);
  /// `rank` closed its communicator, after so many calls, and has gone.
  void leave(Rank rank, std::uint32_t called) { left_[rank] = called; }
  bool heard(Rank rank) const { return statements_[rank].has_value(); }
  /// False once a rank has stopped without calling operation `sequence`: it never will.
  bool all_heard_have_called(std::uint32_t sequence) const;
  /// True if `rank` has failed so that no statement of it is to be expected.
  bool is_lost(Rank rank) const;

  /// The first operation that the ranks heard so far did not call alike.
  std::optional<std::uint32_t> mismatched_operation() const;

  struct Verdict {
    FailureKind kind;
    Rank culprit;
    std::uint32_t sequence;
    std::string reason;
  };
  /// Once at least one statement has been heard.
  Verdict verdict() const;

 private:
  std::optional<Verdict> mismatch() const;
  std::optional<Verdict> admitted() const;
  std::optional<Verdict> damage() const;
  std::optional<Verdict> lost() const;
  Verdict timed_out() const;

  bool is_accused(Rank rank) const;

  Rank self_;
  std::vector<std::optional<Statement>> statements_;  // by rank
  std::vector<std::optional<std::string>> losses_;    // by rank: why
  std::vector<std::optional<std::uint32_t>> left_;    // by rank: how many operations it had called
};

/// "rank 3", "ranks 0, 2, 3".
std::string list_of(const std::vector<Rank>& ranks);

}  // namespace telegrad
