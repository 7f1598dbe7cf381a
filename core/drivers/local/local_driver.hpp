#pragma once
// Ranks that share one process and one engine: a message is a copy from the sender's memory to the receiver's.

#include <deque>
#include <memory>
#include <vector>

#include "base/buffer.hpp"
#include "transport/driver.hpp"

namespace telegrad {

class LocalDriver;

/// The n ends of an in-process network. All are driven by the same engine, so nothing here is locked.
class LocalNetwork {
 public:
  /// `shares_memory`: what Transport::shares_memory() says. Messages are the same copies then, but collectives cut them
  /// as they do between the processes of a host.
  explicit LocalNetwork(Rank size, bool shares_memory = false) : drivers_(size, nullptr), shares_memory_(shares_memory) {}

  Rank size() const { return static_cast<Rank>(drivers_.size()); }
  bool shares_memory() const { return shares_memory_; }

 private:
  friend class LocalDriver;
  std::vector<LocalDriver*> drivers_;  // null: not yet made, or shut down
  const bool shares_memory_;
};

class LocalDriver : public Driver {
 public:
  LocalDriver(std::shared_ptr<LocalNetwork> network, Rank rank);
  ~LocalDriver() override;

  Rank rank() const override { return rank_; }
  Rank size() const override { return network_->size(); }
  const char* name() const override { return "local"; }
  void attach(EventSink& sink) override { sink_ = &sink; }
  bool shares_memory() const override { return network_->shares_memory(); }

  void send(Rank to, const Envelope& envelope, ConstBytes bytes, Pending& pending) override;
  void accept(const Arrival& arrival, Bytes into, Pending& pending) override;
  void discard(const Arrival& arrival) override;
  void send_control(Rank to, const Control& control) override;
  void compute(std::size_t bytes, Pending& pending) override;

  bool progress() override;
  bool arm() override { return parcels_.empty() && controls_.empty() && gone_.empty(); }
  int wait_descriptor() const override { return -1; }
  double now_s() const override;
  void shut_down() override;
  bool delivers_after_shut_down() const override { return true; }

 private:
  struct Parcel {
    Envelope envelope;
    ConstBytes bytes;  // the sender's memory, which stays until its Pending is done
    Pending* sender;   // null once the sender has closed
    LocalDriver* from;
    Buffer copy{};  // what is left of a closed sender's memory
  };

  std::shared_ptr<LocalNetwork> network_;
  Rank rank_;
  EventSink* sink_ = nullptr;
  std::deque<std::unique_ptr<Parcel>> parcels_;
  std::deque<Control> controls_;
  std::vector<Rank> gone_;  // peers that shut down since the last progress
  std::vector<std::unique_ptr<Parcel>> kept_;  // announced to the sink, not yet accepted
};

}  // namespace telegrad
