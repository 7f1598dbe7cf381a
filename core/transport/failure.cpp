#include "transport/failure.hpp"

namespace telegrad {

std::string Failure::message() const {
  std::string text = "rank " + std::to_string(rank) + ": ";
  if (!operation.empty()) text += operation + (tag ? ": " : " (operation " + std::to_string(sequence) + "): ");
  text += reason;
  if (peer != kNoRank) {
    text += " [peer: rank " + std::to_string(peer);
    if (!host.empty()) text += " on host " + host + ", process " + std::to_string(pid);
    text += "]";
  }
  return text;
}

Failure named(Failure failure, const Call& call, std::uint32_t sequence) {
  failure.operation = describe(call);
  failure.sequence = sequence;
  failure.tag.reset();
  if (is_point_to_point(call)) failure.tag = static_cast<std::uint32_t>(call.layout);
  return failure;
}

}  // namespace telegrad
