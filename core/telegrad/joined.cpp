#include "telegrad/joined.hpp"

#include <cmath>
#include <stdexcept>
#include <string>

#include "progress/communicator.hpp"

namespace telegrad::api::detail {
namespace {

void check_seconds(const char* name, double seconds) {
  if (seconds > 0 && std::isfinite(seconds)) return;
  throw std::invalid_argument(std::string(name) + "=" + std::to_string(seconds) + " must be positive and finite");
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
}

void check_size(Rank size) {
  if (size == 0) throw std::invalid_argument("size=0 must be at least 1: the number of ranks");
}

void check_rank(const char* name, Rank rank, Rank size) {
  if (rank < size) return;
  throw std::invalid_argument(std::string(name) + "=" + std::to_string(rank) + " is no rank of " +
                              std::to_string(size) + ": use one below");
}

CommunicatorOptions own_options(const Options& options) {
  CommunicatorOptions own;
  own.session.timeout_s = options.timeout_s;
  own.session.liveness_timeout_s = options.liveness_timeout_s;
  own.report_folder = options.report_folder;
  return own;
}

}  // namespace telegrad::api::detail
