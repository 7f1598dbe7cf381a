// A session among peers that send anything at all: it never breaks, ends every operation, and stays at its verdict.
#include "testing.hpp"

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "session/messages.hpp"
#include "session/session.hpp"

namespace {

using namespace telegrad;

constexpr Rank kRanks = 4;
constexpr std::uint32_t kEpoch = 77;

// Keeps what has arrived until the session takes it, and takes its time with sends.
class LooseDriver final : public Driver {
 public:
  explicit LooseDriver(Random& random) : random_(random) {}
  Rank rank() const override { return 0; }
  Rank size() const override { return kRanks; }
  const char* name() const override { return "loose"; }
  void attach(EventSink& attached) override { sink = &attached; }
  void send(Rank to, const Envelope&, ConstBytes, Pending& pending) override {
    EXPECT(to < kRanks && to != 0);
    sends_.push_back(&pending);
  }
  void accept(const Arrival& arrival, Bytes into, Pending& pending) override {
    answer(arrival);
    EXPECT_EQ(into.size(), arrival.envelope.length);
    pending.complete(into.size());
  }
  void discard(const Arrival& arrival) override { answer(arrival); }
  void send_control(Rank to, const Control& control) override {
    EXPECT(to < kRanks && to != 0 && control.source == 0);
    EXPECT(control.reason.size() <= Control::kReasonMost && control.calls.size() <= Control::kCallsMost);
  }
  void compute(std::size_t bytes, Pending& pending) override { pending.complete(bytes); }
  bool progress() override { return false; }
  bool arm() override { return true; }
  int wait_descriptor() const override { return -1; }
  double now_s() const override { return 0.0; }
  void shut_down() override {}

  void arrive(const Envelope& envelope) {
    answered_.push_back(0);
    ++open_;
    sink->on_arrival({envelope, &answered_.back()});
  }
  void finish_a_send() {
    if (sends_.empty()) return;
    const std::size_t index = random_.below(sends_.size());
    sends_[index]->complete(0);
    sends_.erase(sends_.begin() + static_cast<std::ptrdiff_t>(index));
  }
  int open() const { return open_; }

  EventSink* sink = nullptr;

 private:
  void answer(const Arrival& arrival) {
    EXPECT_EQ((*static_cast<int*>(arrival.handle))++, 0);  // exactly one answer
    --open_;
  }
  Random& random_;
  std::vector<Pending*> sends_;
  std::deque<int> answered_;
  int open_ = 0;
};

Call some_call(Random& random) {
  Call call{.operation = Operation::allgather, .count = 8};
  if (random.below(8) == 0) call.count = random.below(3);
  if (random.below(16) == 0) call.operation = static_cast<Operation>(random.below(256));
  return call;
}

// Sends to and receives from some peers, in an order of its own.
RequestPtr some_request(Random& random, std::deque<Buffer>& buffers) {
  const auto seed = random.below(1U << 20);
  Call call = some_call(random);
  if (is_point_to_point(call)) call.operation = Operation::barrier;
  return std::make_shared<Request>(call, [seed, &buffers](Transport& net) -> Task<void> {
    Random own(seed);
    for (Step step = 0; step < 3; ++step) {
      Buffer& in = buffers.emplace_back(8);
      auto sending = net.send(1 + static_cast<Rank>(own.below(kRanks - 1)), step, in.bytes());
      if (own.below(2) == 0) {
        co_await net.receive(1 + static_cast<Rank>(own.below(kRanks - 1)), step, in.bytes());
      } else {
        (void)co_await net.receive_any_size(1 + static_cast<Rank>(own.below(kRanks - 1)), step, 16);
      }
      co_await net.compute(64, [] {});
      co_await sending;
    }
  });
}

// A message to or from one of them.
RequestPtr some_message(Random& random, std::deque<Buffer>& buffers) {
  Buffer& memory = buffers.emplace_back(8);
  const Rank other = 1 + static_cast<Rank>(random.below(kRanks - 1));
  const auto tag = static_cast<Step>(random.below(2));
  if (random.below(2) == 0) return make_send(DType::u8, memory.bytes(), other, tag);
  return make_receive(DType::u8, memory.bytes(), other, tag);
}

void play(std::uint64_t seed) {
  Random random(seed);
  LooseDriver driver(random);
  Session session(driver, {.epoch = kEpoch, .timeout_s = 30.0});
  std::deque<Buffer> buffers;
  std::vector<RequestPtr> requests;
  std::uint32_t called = 0;
  std::uint32_t messages = 0;
  double now_s = 0.0;
  std::string verdict;
  std::size_t finished = 0;
  const auto some_rank = [&] { return static_cast<Rank>(random.below(kRanks + 1)); };
  session.join(now_s);
  for (int event = 0; event < 300; ++event) {
    switch (random.below(14)) {
      case 12: session.begin(requests.emplace_back(some_message(random, buffers)), now_s); break;
      case 13: {
        Envelope envelope;
        envelope.epoch = kEpoch;
        envelope.sequence = random.below(100) == 0 ? static_cast<std::uint32_t>(random.below(1U << 22)) * 1024U
                                                   : messages++ / (kRanks - 1) + static_cast<std::uint32_t>(random.below(2));
        envelope.step = static_cast<Step>(random.below(2));
        envelope.source = 1 + messages % (kRanks - 1);
        envelope.length = random.below(50) == 0 ? 9 : 8;
        envelope.call = {.operation = Operation::send, .count = random.below(50) == 0 ? 9U : 8U};
        driver.arrive(envelope);
        break;
      }
      case 0:
      case 1:
        ++called;
        session.begin(requests.emplace_back(some_request(random, buffers)), now_s);
        break;
      case 2:
      case 3:
      case 4:
      case 5: {
        Envelope envelope;
        envelope.epoch = random.below(20) == 0 ? 5 : kEpoch;
        envelope.sequence = called + static_cast<std::uint32_t>(random.below(4)) - 2;
        envelope.step = static_cast<Step>(random.below(3));
        envelope.source = random.below(20) == 0 ? some_rank() : 1 + static_cast<Rank>(random.below(kRanks - 1));
        envelope.length = random.below(20) == 0 ? random.below(40) : 8;
        envelope.call = some_call(random);
        driver.arrive(envelope);
        break;
      }
      case 6: {
        Control control;
        control.kind = static_cast<ControlKind>(random.below(20) == 0 ? 1 + random.below(5) : 1 + random.below(2));
        control.failure = static_cast<FailureKind>(1 + random.below(4));
        control.source = some_rank();
        control.origin = some_rank();
        control.culprit = random.below(2) == 0 ? kNoRank : some_rank();
        control.epoch = random.below(20) == 0 ? 5 : kEpoch;
        control.sequence = static_cast<std::uint32_t>(random.below(1U << 30)) * 4;
        control.messages = static_cast<std::uint32_t>(random.below(8));
        control.point_to_point = random.below(2) == 0;
        control.called = called + static_cast<std::uint32_t>(random.below(4)) - 1;
        control.first_call = random.below(3) == 0 ? static_cast<std::uint32_t>(random.below(1U << 30)) : called;
        for (std::size_t i = random.below(Control::kCallsMost + 1); i > 0; --i) control.calls.push_back(some_call(random));
        control.reason = std::string(random.below(Control::kReasonMost), 'x');
        driver.sink->on_control(control);
        break;
      }
      case 7:
        if (random.below(30) == 0) driver.sink->on_peer_failed(1 + static_cast<Rank>(random.below(kRanks - 1)), "gone");
        break;
      case 8: driver.finish_a_send(); break;
      case 9:
        now_s += 0.01 * static_cast<double>(random.below(100));
        session.on_time(now_s);
        break;
      default: session.run_ready(); break;
    }
    if (session.failure()) {
      if (verdict.empty()) verdict = session.failure()->message();
      for (; finished < requests.size(); ++finished) EXPECT(requests[finished]->done());
    }
  }
  for (int second = 0; second < 45; ++second) {
    now_s += 1.0;
    session.on_time(now_s);
    session.run_ready();
  }
  for (const auto& request : requests) EXPECT(request->done());  // by a time-out at the latest
  if (session.failure()) {
    if (!verdict.empty()) EXPECT_EQ(session.failure()->message(), verdict);
    EXPECT_EQ(driver.open(), 0);  // what has arrived was given back
  }
  (void)to_json(session.report(now_s), {.why = "asked", .driver = "loose", .host = ""});
  session.release_quarantine();
}

TEST("whatever peers send, every operation ends") {
  for (std::uint64_t seed = 0; seed < 20000; ++seed) play(seed);
}

}  // namespace
