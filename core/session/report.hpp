#pragma once
// What a rank knows of the state of its operations and peers, for people who look for the cause of a hang, as JSON
// (docs/reference/errors.md describes the form; its version rises when a reader would have to change).

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "session/history.hpp"
#include "transport/failure.hpp"

namespace telegrad {

struct SessionReport {
  static constexpr std::size_t kMessagesMost = 64;
  struct Peer {
    Rank rank = 0;
    std::string host{};      // empty: unknown
    std::uint32_t pid = 0;   // 0: unknown
    const char* state = "";  // alive, failed, closed
    std::optional<std::uint32_t> called{};
    double heard_s_ago = 0.0;
  };
  struct OperationReport {
    History::Entry entry{};
    std::vector<Rank> waits_for{};
    std::vector<Rank> sends_to{};
  };
  /// A send or receive that is not over, or has failed.
  struct Message {
    Call call{};
    OperationState state = OperationState::running;
    double called_s = 0.0;
    std::uint32_t before = 0;  // the operation that this rank called next, or will
  };
  Rank rank = 0;
  Rank size = 0;
  std::uint32_t epoch = 0;
  double now_s = 0.0;
  double timeout_s = 0.0;
  std::optional<double> liveness_timeout_s{};
  std::shared_ptr<const Group> group{};  // null: of no split()
  std::uint32_t called = 0;
  std::uint64_t completed = 0;
  std::optional<Failure> failure{};
  std::vector<Peer> peers{};
  std::vector<OperationReport> operations{};  // oldest first
  std::vector<Message> messages{};      // oldest first
};

/// What only the process knows.
struct ReportOrigin {
  std::string why;  // timeout, stall, signal, asked
  std::string driver;
  std::string host;
  std::uint32_t pid = 0;
  double unix_s = 0.0;
};

std::string to_json(const SessionReport& report, const ReportOrigin& origin);
/// How Python calls it: "PeerFailed", …
const char* error_name(FailureKind kind);

}  // namespace telegrad
