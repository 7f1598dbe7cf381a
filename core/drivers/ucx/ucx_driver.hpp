#pragma once
// The ucx driver: one rank on UCX, over shared memory, TCP or RDMA alike, by active messages.
// Each peer has two endpoints, on two workers, each made with its first message, or in joining if they share memory. `data` runs without UCX's error handling,
// which would forbid the fast paths. `control` runs with it and with keepalive, and notices a dead peer; but without it, in
// shared memory, where the kernel tells of deaths. Its worker is its own. So waiting for data does not look at its sockets
// in every turn, and a peer that is frozen in the middle of writing data into shared memory does not block it.

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "drivers/processes/huge_pages.hpp"
#include "drivers/processes/message_guard.hpp"
#include "drivers/processes/process_watch.hpp"
#include "drivers/ucx/connection_gate.hpp"
#include "drivers/ucx/ucx_options.hpp"
#include "transport/driver.hpp"

namespace telegrad {

class UcxDriver final : public AddressedDriver {
 public:
  /// Opens UCX, without shared memory where that is allowed and cannot be had; throws TransportError saying what UCX said.
  UcxDriver(Rank rank, Rank size, const UcxOptions& options);
  ~UcxDriver() override;

  /// Which process this is, and how to reach its workers.
  std::vector<std::byte> address() const override;
  void connect(std::span<const std::vector<std::byte>> addresses) override;
  void guard_by(std::shared_ptr<MessageGuard> guard) override { guard_ = std::move(guard); }
  static std::string version();

  Rank rank() const override { return rank_; }
  Rank size() const override { return size_; }
  const char* name() const override { return "ucx"; }
  PeerIdentity identity(Rank rank) const override;
  bool shares_memory() const override { return shares_memory_; }
  bool shares_memory_with(Rank rank) const override;
  std::string warning() const override { return warning_; }
  void attach(EventSink& sink) override { sink_ = &sink; }

  void send(Rank to, const Envelope& envelope, ConstBytes bytes, Pending& pending) override;
  void accept(const Arrival& arrival, Bytes into, Pending& pending) override;
  void discard(const Arrival& arrival) override;
  void send_control(Rank to, const Control& control) override;
  void compute(std::size_t bytes, Pending& pending) override { pending.complete(bytes); }

  bool progress() override;
  bool arm() override;
  int wait_descriptor() const override { return descriptor_; }
  double now_s() const override;
  void shut_down() override;
  std::uint64_t refused() const override { return guard_ ? guard_->refused() : 0; }

 private:
  struct Worker;    // UCX's objects and callbacks, so that its headers stay out of this one
  struct Incoming;  // a message that has arrived and is not yet accepted
  struct Transfer;  // a message that UCX sends or receives for a Pending
  struct Unproven;  // the payload of a message, which is checked once it is here
  // What a rank says of shared memory with its address.
  enum class Memory : std::uint8_t { unused = 0, used = 1, lost = 2 };

  template <class Body>
  void guarded(Body body) noexcept;
  Transfer* make_transfer(Rank peer, Pending& pending);
  void handed_over(Transfer& transfer, void* request, std::size_t bytes, const char* what);
  Incoming* make_incoming();
  void complete(Transfer& transfer, std::size_t bytes);
  void recycle(Incoming* incoming);
  void peer_broke(Rank peer, std::string reason) { broken_.emplace_back(peer, std::move(reason)); }
  void say(Rank to, const Control& control);
  void hear(ConstBytes header, ConstBytes payload);
  bool is_of_the_job(ConstBytes header, ConstBytes payload, bool is_here);
  void open();
  void open_or_shut_down();
  bool take_data(ConstBytes header, void* data, std::size_t length, std::uint64_t attributes);
  bool all_have_memory(std::span<const std::vector<std::byte>> addresses) const;
  void meet(Rank rank);
  bool reach(Rank rank, bool for_data);
  bool make_endpoints_ahead(Rank rank);
  bool make_endpoint(Rank rank, bool for_data);
  bool holds_memory(Rank rank);
  [[noreturn]] void blame_for(Rank rank);
  [[noreturn]] void fail_joining(FailureKind kind, Rank peer, const std::string& reason) const;
  std::vector<std::vector<Place>> places_of(std::span<const std::vector<std::byte>> addresses) const;

  Rank rank_;
  Rank size_;
  EventSink* sink_ = nullptr;
  UcxOptions options_;
  bool expects_memory_;         // of all ranks, so that no network is open
  bool allows_memory_ = false;  // UCX may use it here
  std::string lost_memory_;     // why it cannot, though it is allowed
  std::string warning_;         // of what was lost, on one rank of the host
  bool shares_memory_ = false;
  int descriptor_ = -1;  // over both workers' and that of deaths_
  bool is_armed_ = false;       // the last call was arm(), which may have been woken from
  bool control_armed_ = false;  // nothing has been done with it since
  unsigned turns_without_control_ = 0;
  ProcessWatch deaths_;
  std::unique_ptr<ConnectionGate> gate_;  // null: UCX hears whoever connects
  std::shared_ptr<MessageGuard> guard_;  // null: every message is taken for what it says
  HugePages huge_pages_;
  std::unique_ptr<Worker> worker_;
  std::vector<std::unique_ptr<Incoming>> incoming_;  // all that were ever made
  std::vector<Incoming*> idle_incoming_;
  std::vector<std::unique_ptr<Transfer>> transfers_;  // all that were ever made
  std::vector<Transfer*> idle_transfers_;
  std::exception_ptr thrown_;                         // inside a UCX callback, to be thrown after it
  std::vector<std::pair<Rank, std::string>> broken_;  // noticed inside a UCX callback, reported after it
  std::vector<std::pair<Rank, std::string>> lost_;    // whose messages failed: the same, once no last words are left to be read
  std::vector<std::pair<Rank, Control>> unsaid_;      // goes once what has come is read
  std::vector<Rank> dead_;                            // reported once nothing of theirs is left to be read
};

}  // namespace telegrad
