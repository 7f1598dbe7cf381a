#pragma once
// One rank's end of a SimNetwork. It makes no progress by itself: whoever runs the network steps it.

#include <memory>

#include "drivers/sim/sim_network.hpp"

namespace telegrad {

class SimDriver final : public Driver {
 public:
  SimDriver(SimNetwork& network, Rank rank) : network_(network), rank_(rank) {}

  Rank rank() const override { return rank_; }
  Rank size() const override { return network_.size(); }
  const char* name() const override { return "sim"; }
  void attach(EventSink& sink) override { network_.ends_[rank_].sink = &sink; }

  void send(Rank to, const Envelope& envelope, ConstBytes bytes, Pending& pending) override {
    network_.send(rank_, to, envelope, bytes, pending);
  }
  void accept(const Arrival& arrival, Bytes into, Pending& pending) override {
    network_.accept(message_of(arrival), into, pending);
  }
  void discard(const Arrival& arrival) override { network_.release(message_of(arrival)); }
  void send_control(Rank to, const Control& control) override {
    network_.send_control(rank_, to, control);
  }
  void compute(std::size_t bytes, Pending& pending) override { network_.compute(rank_, bytes, pending); }

  bool progress() override { return false; }
  bool arm() override { return true; }
  int wait_descriptor() const override { return -1; }
  double now_s() const override { return network_.now_s(); }
  void shut_down() override { network_.shut_down(rank_); }

 private:
  static SimNetwork::Message& message_of(const Arrival& arrival) {
    return *static_cast<SimNetwork::Message*>(arrival.handle);
  }

  SimNetwork& network_;
  Rank rank_;
};

}  // namespace telegrad
