#pragma once
// One rank's session, whose peers are the test.

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "session/session.hpp"

namespace telegrad {

inline constexpr Call kCall{.operation = Operation::allgather, .count = 5};

inline RequestPtr request(Request::Body body, Call call = kCall) { return std::make_shared<Request>(call, std::move(body)); }

// Receives as many bytes as `into` has in `step` from rank 1.
inline RequestPtr receiver(Buffer& into, Step step, Call call = kCall) {
  return request([&into, step](Transport& net) -> Task<void> { co_await net.receive(1, step, into.bytes()); }, call);
}

// A network whose other end is the test.
class ScriptedDriver final : public Driver {
 public:
  explicit ScriptedDriver(Rank size) : size_(size) {}
  Rank rank() const override { return 0; }
  Rank size() const override { return size_; }
  const char* name() const override { return "scripted"; }
  void attach(EventSink& attached) override { sink = &attached; }
  void send(Rank to, const Envelope& envelope, ConstBytes, Pending& pending) override {
    sent.push_back({to, envelope});
    pending.complete(envelope.length);
  }
  void accept(const Arrival& arrival, Bytes into, Pending& pending) override {
    for (std::byte& byte : into) byte = std::byte{static_cast<unsigned char>(arrival.envelope.step + 1)};
    ++accepted;
    pending.complete(into.size());
  }
  void discard(const Arrival&) override { ++discarded; }
  void send_control(Rank to, const Control& control) override { controls.push_back({to, control}); }
  void compute(std::size_t bytes, Pending& pending) override { pending.complete(bytes); }
  bool progress() override { return false; }
  bool arm() override { return true; }
  int wait_descriptor() const override { return -1; }
  double now_s() const override { return 0.0; }
  void shut_down() override {}

  void arrive(Rank source, std::uint32_t sequence, Step step, std::size_t length, Call call = kCall) {
    Envelope envelope;
    envelope.source = source;
    envelope.sequence = sequence;
    envelope.step = step;
    envelope.length = length;
    envelope.call = call;
    sink->on_arrival({envelope, nullptr, length});
  }
  std::vector<std::pair<Rank, Control>> of_kind(ControlKind kind) const {
    std::vector<std::pair<Rank, Control>> found;
    for (const auto& entry : controls) {
      if (entry.second.kind == kind) found.push_back(entry);
    }
    return found;
  }

  EventSink* sink = nullptr;
  std::vector<std::pair<Rank, Envelope>> sent;
  std::vector<std::pair<Rank, Control>> controls;
  int accepted = 0;
  int discarded = 0;

 private:
  Rank size_;
};

struct Scripted {
  // Its peers say nothing by themselves, so there is nobody to agree with.
  explicit Scripted(Rank size = 3, SessionOptions options = {}) : driver(size), session(driver, alone(options)) {}
  static SessionOptions alone(SessionOptions options) {
    options.agreement_s = 0.0;
    return options;
  }
  void turns() {
    while (session.run_ready()) {
    }
  }
  ScriptedDriver driver;
  Session session;
};

}  // namespace telegrad
