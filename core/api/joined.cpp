#include "api/joined.hpp"

#include <limits>
#include <cmath>
#include <stdexcept>
#include <string>

#include "progress/communicator.hpp"

namespace telegrad::api::detail {
namespace {

constexpr Rank kMostRanks = 1U << 24U;  // of any job that there is
constexpr Rank kMostLocalRanks = 4096;  // which take a gigabyte

void check_seconds(const char* name, double seconds) {
  if (seconds > 0 && std::isfinite(seconds)) return;
  throw std::invalid_argument(std::string(name) + "=" + std::to_string(seconds) + " must be positive and finite: give seconds");
}

}  // namespace

void raise(const Failure& failure) {
  api::TransportError::Facts facts{.rank = failure.rank, .host = failure.host, .operation = failure.operation};
  if (failure.peer != kNoRank) facts.peer = failure.peer;
  if (!failure.operation.empty()) facts.tag = failure.tag.value_or(failure.sequence);
  const std::string message = failure.message();
  switch (failure.kind) {
    case FailureKind::peer_failed: throw PeerFailed(message, std::move(facts));
    case FailureKind::timeout: throw TimeoutExpired(message, std::move(facts));
    case FailureKind::mismatched_call: throw MismatchedCall(message, std::move(facts));
    case FailureKind::transport: break;
  }
  throw api::TransportError(message, std::move(facts));
}

void check(const Options& options) {
  check_seconds("timeout_s", options.timeout_s);
  if (options.liveness_timeout_s) check_seconds("liveness_timeout_s", *options.liveness_timeout_s);
  if (options.stall_s) check_seconds("stall_s", *options.stall_s);
}

void check_size(Rank size) {
  if (size == 0) throw std::invalid_argument("size=0 must be at least 1: the number of ranks");
  if (size > kMostRanks) {
    throw std::invalid_argument("size=" + std::to_string(size) + " is more ranks than any job has: was it a negative "
                                "number?");
  }
}

void check_local_size(Rank size) {
  check_size(size);
  if (size <= kMostLocalRanks) return;
  throw std::invalid_argument("size=" + std::to_string(size) + " is more ranks than one process can hold, each with a "
                              "connection to every other: use at most " + std::to_string(kMostLocalRanks));
}

void check_rank(const char* name, Rank rank, Rank size) {
  if (rank < size) return;
  throw std::invalid_argument(std::string(name) + "=" + std::to_string(rank) + " is no rank of " +
                              std::to_string(size) + ": use one of 0 to " + std::to_string(size - 1));
}

CommunicatorOptions own_options(const Options& options) {
  CommunicatorOptions own;
  own.session.timeout_s = options.timeout_s;
  own.session.liveness_timeout_s = options.liveness_timeout_s;
  own.session.stall_s = options.stall_s.value_or(std::numeric_limits<double>::infinity());
  own.report_folder = options.report_folder;
  return own;
}

}  // namespace telegrad::api::detail
