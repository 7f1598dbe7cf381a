#pragma once
// What a network offers to one rank's Session. A driver moves messages and knows the time; it must not know what an
// operation is, and never resumes a coroutine: it completes Pendings and reports to its EventSink.
// All calls come from whoever holds the engine's baton, one at a time; only wake() may come from any thread.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/types.hpp"
#include "transport/envelope.hpp"
#include "transport/failure.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// A message that has announced itself. The driver keeps what it needs to fetch the payload behind `handle`.
struct Arrival {
  static constexpr std::size_t kEntry = 256;  // about what a message takes that is kept, beside its payload

  Envelope envelope;
  void* handle = nullptr;
  std::size_t held = 0;  // bytes of the payload that lie in this process's memory until it is accepted

  std::size_t memory() const { return held + kEntry; }
};

/// Control messages travel apart from data, on connections that notice a dead peer.
enum class ControlKind : std::uint8_t { hello = 1, heartbeat = 2, abort = 3, goodbye = 4, call = 5 };
struct Control {
  static constexpr std::size_t kReasonMost = 2048;
  static constexpr std::size_t kCallsMost = 32;

  ControlKind kind = ControlKind::heartbeat;
  FailureKind failure = FailureKind::transport;
  Rank source = 0;
  Rank origin = kNoRank;  // abort: who found the failure
  Rank culprit = kNoRank;
  bool culprit_speaks = false;  // abort: it has left, and can still say something itself
  bool point_to_point = false;  // abort: between two ranks, not in operation `sequence` but before it
  std::uint32_t epoch = 0;
  std::uint32_t wire_version = kWireVersion;
  std::uint32_t sequence = 0;    // abort: which operation failed
  std::uint32_t called = 0;      // how many operations the sender has called
  std::uint32_t first_call = 0;  // the sequence number of calls[0]
  std::uint32_t messages = 0;    // how many messages outside operations the sender has sent to the receiver
  std::uint32_t endianness = 0x01020304;
  std::vector<Call> calls{};  // abort: around the failure; call: the one that waits for the receiver
  std::string reason{};
};

/// Where a rank lives, as far as the network knows.
struct PeerIdentity {
  std::string host{};     // empty: unknown
  std::uint32_t pid = 0;  // 0: unknown
};

class EventSink {
 public:
  virtual ~EventSink() = default;
  /// A message is here. The sink answers with exactly one of Driver::accept, discard (both may come later).
  virtual void on_arrival(const Arrival& arrival) = 0;
  virtual void on_control(const Control& control) = 0;
  /// The control connection to `peer` broke, or its process is known to be dead.
  virtual void on_peer_failed(Rank peer, const std::string& reason) = 0;
  /// Bytes came that no telegrad of this version would send.
  virtual void on_damage(const std::string& reason) = 0;
};

class Driver {
 public:
  virtual ~Driver() = default;

  virtual Rank rank() const = 0;
  virtual Rank size() const = 0;
  virtual const char* name() const = 0;
  virtual PeerIdentity identity(Rank) const { return {}; }
  /// See Transport::shares_memory(); known once it is connected.
  virtual bool shares_memory() const { return false; }
  /// The same of this rank and one other. If it holds of two pairs with a rank in common, then of the third too.
  virtual bool shares_memory_with(Rank) const { return shares_memory(); }
  /// What the user should hear of the way that was found, once it is connected: one rank of those concerned says it, the
  /// others nothing.
  virtual std::string warning() const { return {}; }
  virtual void attach(EventSink& sink) = 0;

  virtual void send(Rank to, const Envelope& envelope, ConstBytes bytes, Pending& pending) = 0;
  /// Puts the payload, which is `into.size()` bytes long, into `into`; then completes `pending`.
  virtual void accept(const Arrival& arrival, Bytes into, Pending& pending) = 0;
  virtual void discard(const Arrival& arrival) = 0;
  virtual void send_control(Rank to, const Control& control) = 0;
  /// Spends the time of touching `bytes` bytes: none, where time passes by itself.
  virtual void compute(std::size_t bytes, Pending& pending) = 0;

  /// Whether reduce() works, the same on all ranks; known once it is connected.
  virtual bool reduces() const { return false; }
  /// The number of the next reduce(); all ranks take them in the same order.
  virtual std::uint64_t take_turn() { return 0; }
  /// values = the reduction of all ranks' `values` by a collective of the network's, which begins when those of earlier
  /// turns have begun. shut_down() takes the Buffer of one that is not over: the network may still write there.
  virtual void reduce(std::uint64_t, DType, Reduction, Buffer&, Pending&) {}

  /// True if anything happened.
  virtual bool progress() = 0;
  /// Prepares to block on wait_descriptor(); false if there is something to progress first.
  virtual bool arm() = 0;
  /// A descriptor that becomes readable when an armed driver has something to progress, or -1.
  virtual int wait_descriptor() const = 0;
  virtual double now_s() const = 0;
  /// Lets go of all that the network still holds; Pendings that are not done never will be.
  virtual void shut_down() = 0;
  /// True if what was sent still arrives after shut_down(), so that a rank may leave before its peers do.
  virtual bool delivers_after_shut_down() const { return false; }
  /// How many messages did not prove that they are of a rank of the job.
  virtual std::uint64_t refused() const { return 0; }
};

class MessageGuard;

/// A driver whose ranks are processes: they learn each other's addresses, in whatever way, before a session uses it.
class AddressedDriver : public Driver {
 public:
  /// The bytes by which peers know and reach this rank.
  virtual std::vector<std::byte> address() const = 0;
  /// `addresses[r]` is rank r's address(); once. Throws TransportError.
  virtual void connect(std::span<const std::vector<std::byte>> addresses) = 0;
  /// From now on every message proves itself by `guard`; before connect(). Only of a driver that strangers can reach.
  virtual void guard_by(std::shared_ptr<MessageGuard> guard) { (void)guard; }
};

}  // namespace telegrad
