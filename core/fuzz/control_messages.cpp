// What reads control messages, greetings, identities and envelopes: libFuzzer's entry point, which the core's tests call too.

#include "fuzz/control_messages.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/check.hpp"
#include "drivers/processes/control_wire.hpp"
#include "drivers/processes/job_key.hpp"
#include "drivers/processes/process_identity.hpp"
#include "session/moves.hpp"
#include "session/session.hpp"

namespace telegrad::fuzz {
namespace {

constexpr Rank kRanks = 3;
constexpr std::uint32_t kEpoch = 77;

// Memory of just that size, so that a sanitizer sees every read outside.
class Copy {
 public:
  explicit Copy(ConstBytes bytes) : memory_(std::make_unique<std::byte[]>(bytes.size())), size_(bytes.size()) {
    std::ranges::copy(bytes, memory_.get());
  }
  ConstBytes bytes() const { return {memory_.get(), size_}; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::size_t size_;
};

template <class Value>
ConstBytes bytes_of(const Value& value) {
  return std::as_bytes(std::span(&value, 1));
}

bool read_control(ConstBytes input) {
  const std::size_t at = std::min(input.size(), sizeof(ControlHeader));
  const Copy header(input.first(at)), payload(input.subspan(at));
  const auto control = decode_control(header.bytes(), payload.bytes());
  if (!control) return false;
  const ControlHeader again = header_of(*control);
  const std::string same = payload_of(*control);
  TELEGRAD_CHECK(std::ranges::equal(bytes_of(again), header.bytes()));
  TELEGRAD_CHECK(std::ranges::equal(std::as_bytes(std::span(same)), payload.bytes()));
  return true;
}

bool read_greeting(ConstBytes input) {
  static const JobKey key = JobKey::of("a key of the fuzzer, in 32 characters", false);
  for (const bool is_keyed : {false, true}) {
    const JobKey own = is_keyed ? key : JobKey();
    Greeting greeting(own, 0, 2);
    std::vector<std::vector<std::byte>> blobs{greeting.say(input), {input.begin(), input.end()}};
    try {
      greeting.hear(blobs);
      TELEGRAD_CHECK(!is_keyed);  // nobody guesses a proof
      TELEGRAD_CHECK(std::ranges::equal(blobs[0], input));
      return true;
    } catch (const TransportError&) {
    } catch (const std::invalid_argument&) {
    }
  }
  return false;
}

bool read_identity(ConstBytes input) {
  const Copy copy(input);
  ConstBytes rest = copy.bytes();
  const auto identity = ProcessIdentity::take_from(rest);
  if (!identity) return false;
  std::vector<std::byte> again;
  identity->append_to(again);
  TELEGRAD_CHECK(again.size() + rest.size() == input.size());
  return true;
}

// Takes sends at once, and keeps what has arrived until the session answers.
class Recorded final : public Driver {
 public:
  Rank rank() const override { return 0; }
  Rank size() const override { return kRanks; }
  const char* name() const override { return "recorded"; }
  void attach(EventSink& attached) override { sink = &attached; }
  void send(Rank, const Envelope&, ConstBytes, Pending& pending) override { pending.complete(0); }
  void accept(const Arrival& arrival, Bytes into, Pending& pending) override {
    discard(arrival);
    TELEGRAD_CHECK(into.size() == arrival.envelope.length);
    pending.complete(into.size());
  }
  void discard(const Arrival& arrival) override {
    bool& answered = *static_cast<bool*>(arrival.handle);
    TELEGRAD_CHECK(!answered);
    answered = true;
  }
  void send_control(Rank, const Control&) override {}
  void compute(std::size_t bytes, Pending& pending) override { pending.complete(bytes); }
  bool progress() override { return false; }
  bool arm() override { return true; }
  int wait_descriptor() const override { return -1; }
  double now_s() const override { return 0.0; }
  void shut_down() override {}

  EventSink* sink = nullptr;
};

// Each event is a byte, and for a message its bytes: an envelope, or a control message without calls.
bool play_session(ConstBytes input) {
  Recorded driver;
  Session session(driver, {.epoch = kEpoch, .timeout_s = 30.0});
  std::deque<bool> answered;
  std::deque<std::vector<std::byte>> memory;
  std::vector<RequestPtr> requests;
  double now_s = 0.0;
  session.join(now_s);
  const auto take = [&](auto& value) {
    const std::size_t length = std::min(sizeof value, input.size());
    std::memcpy(static_cast<void*>(&value), input.data(), length);
    input = input.subspan(length);
  };
  while (!input.empty()) {
    std::uint8_t event = 0;
    take(event);
    switch (event % 5) {
      case 0: {
        auto& data = memory.emplace_back(8);
        requests.push_back(make_broadcast(kRanks, DType::u8, data, event / 5 % kRanks));
        session.begin(requests.back(), now_s);
        break;
      }
      case 1: {
        Envelope envelope;
        envelope.call = {.operation = Operation::broadcast, .root = 1, .count = 8};
        envelope.length = 8;
        take(envelope);
        if (event % 2 == 0) envelope.epoch = kEpoch;
        driver.sink->on_arrival({envelope, &answered.emplace_back(false)});
        break;
      }
      case 2: {
        ControlHeader header;
        take(header);
        header.calls = 0;
        if (event % 2 == 0) header.epoch = kEpoch;
        if (const auto control = decode_control(bytes_of(header), {})) driver.sink->on_control(*control);
        break;
      }
      case 3: session.run_ready(); break;
      default: session.on_time(now_s += 0.5 * event / 255.0); break;
    }
  }
  for (int second = 0; second < 45; ++second) {
    session.on_time(now_s += 1.0);
    session.run_ready();
  }
  for (const RequestPtr& request : requests) TELEGRAD_CHECK(request->done());
  const bool fine = !session.failure();
  if (!fine) TELEGRAD_CHECK(std::ranges::all_of(answered, [](bool one) { return one; }));
  session.release_quarantine();
  return fine;
}

}  // namespace

bool read_control_message(ConstBytes input) {
  if (input.empty()) return false;
  const auto part = static_cast<ControlPart>(static_cast<unsigned>(input.front()) % kControlParts);
  const ConstBytes rest = input.subspan(1);
  switch (part) {
    case ControlPart::greeting: return read_greeting(rest);
    case ControlPart::identity: return read_identity(rest);
    case ControlPart::session: return play_session(rest);
    default: return read_control(rest);
  }
}

}  // namespace telegrad::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  telegrad::fuzz::read_control_message(std::as_bytes(std::span(data, size)));
  return 0;
}
