#include "transport/failure.hpp"

namespace telegrad {

std::string Failure::message() const {
  std::string text = "rank " + std::to_string(rank) + ": ";
  if (!operation.empty()) text += operation + " (operation " + std::to_string(sequence) + "): ";
  text += reason;
  if (peer != kNoRank) {
    text += " [peer: rank " + std::to_string(peer);
    if (!host.empty()) text += " on host " + host + ", process " + std::to_string(pid);
    text += "]";
  }
  return text;
}

}  // namespace telegrad
