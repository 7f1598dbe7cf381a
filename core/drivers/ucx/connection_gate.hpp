#pragma once
// Lets no TCP connection reach UCX that has not proven the job's key. UCX trusts every connection: whoever speaks its
// protocol can end the process, or write into its memory.
// So UCX's calls of listen(), accept() and connect() are led through here, by the entries of libucs's table of foreign
// functions. A rank sends 40 bytes before UCX's own: who it is, a number, and a MAC under a key of these two ranks and this
// join. The number counts once, so that what is recorded is worth nothing. The listener does not wait: the kernel tells of
// a connection when its first bytes are there (TCP_DEFER_ACCEPT).

#include <netinet/in.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/types.hpp"
#include "drivers/processes/message_guard.hpp"

namespace telegrad {

/// Where a rank listens.
struct Place {
  std::array<std::uint8_t, 16> address{};  // IPv4: the first four
  std::uint16_t port = 0;                  // as on the wire
  std::uint16_t family = 0;
  auto operator<=>(const Place&) const = default;
};
static_assert(sizeof(Place) == 20);

class ConnectionGate {
 public:
  /// Throws TransportError where this UCX's calls cannot be led through here.
  explicit ConnectionGate(Rank rank);
  ~ConnectionGate();
  ConnectionGate(const ConnectionGate&) = delete;
  ConnectionGate& operator=(const ConnectionGate&) = delete;

  /// What this thread makes UCX listen on while it lives is this gate's.
  class Opening {
   public:
    explicit Opening(ConnectionGate* gate);
    ~Opening();
    Opening(const Opening&) = delete;
    Opening& operator=(const Opening&) = delete;
  };

  std::vector<Place> places() const;
  /// From now on connections to and from the job's ranks are made; before, they wait.
  void open(std::shared_ptr<MessageGuard> guard, std::span<const std::vector<Place>> places_by_rank);

  // For the calls that are led through here; with the lock held.
  void listens(int descriptor) { listeners_.push_back(descriptor); }
  bool is_open() const { return guard_ != nullptr; }
  /// Takes the proof off the new connection; false: it is a stranger's.
  bool admits(int descriptor);
  std::array<std::byte, 40> proof_for(Rank rank);

 private:
  Rank rank_;
  std::vector<int> listeners_;
  std::shared_ptr<MessageGuard> guard_;
};

}  // namespace telegrad
