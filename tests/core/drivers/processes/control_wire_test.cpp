// Control messages as bytes: what is sent comes back, and nothing else is taken for one.
#include "testing.hpp"

#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "drivers/processes/control_wire.hpp"

namespace {

using namespace telegrad;

std::optional<Control> decode(const ControlHeader& header, const std::string& payload) {
  return decode_control(std::as_bytes(std::span(&header, 1)), std::as_bytes(std::span(payload)));
}

Control some_control(std::size_t calls, std::size_t reason) {
  Control control{.kind = ControlKind::abort,
                  .failure = FailureKind::mismatched_call,
                  .source = 1,
                  .origin = 2,
                  .culprit = 3,
                  .point_to_point = true,
                  .epoch = 4,
                  .sequence = 5,
                  .called = 6,
                  .first_call = 7,
                  .messages = 8};
  for (std::size_t i = 0; i < calls; ++i) control.calls.push_back({.operation = Operation::allreduce, .count = i});
  control.reason.assign(reason, 'r');
  return control;
}

TEST("what is sent comes back") {
  for (const std::size_t calls : {std::size_t{0}, std::size_t{1}, Control::kCallsMost}) {
    for (const std::size_t reason : {std::size_t{0}, std::size_t{1}, Control::kReasonMost}) {
      const Control sent = some_control(calls, reason);
      const auto received = decode(header_of(sent), payload_of(sent));
      REQUIRE(received);
      EXPECT_EQ(static_cast<int>(received->kind), static_cast<int>(sent.kind));
      EXPECT_EQ(static_cast<int>(received->failure), static_cast<int>(sent.failure));
      EXPECT_EQ(received->source, 1U);
      EXPECT_EQ(received->origin, 2U);
      EXPECT_EQ(received->culprit, 3U);
      EXPECT_EQ(received->epoch, 4U);
      EXPECT_EQ(received->wire_version, kWireVersion);
      EXPECT_EQ(received->sequence, 5U);
      EXPECT_EQ(received->called, 6U);
      EXPECT_EQ(received->first_call, 7U);
      EXPECT_EQ(received->messages, 8U);
      EXPECT(received->point_to_point && !received->culprit_speaks);
      EXPECT_EQ(received->endianness, sent.endianness);
      EXPECT(received->calls == sent.calls);
      EXPECT_EQ(received->reason, sent.reason);
    }
  }
}

TEST("lengths that do not add up and kinds that do not exist are refused") {
  const Control good = some_control(2, 10);
  const std::string payload = payload_of(good);
  EXPECT(!decode(header_of(good), payload.substr(0, 2 * sizeof(Call) - 1)));
  EXPECT(!decode(header_of(good), payload + std::string(Control::kReasonMost, 'x')));
  for (const auto& [kind, failure] : {std::pair{0, 1}, {6, 1}, {255, 1}, {1, 0}, {1, 5}}) {
    ControlHeader header = header_of(good);
    header.kind = static_cast<std::uint8_t>(kind);
    header.failure = static_cast<std::uint8_t>(failure);
    EXPECT(!decode(header, payload));
  }
  ControlHeader many = header_of(good);
  many.calls = Control::kCallsMost + 1;
  EXPECT(!decode(many, std::string((Control::kCallsMost + 1) * sizeof(Call), '\0')));
  ControlHeader odd = header_of(good);
  odd.point_to_point = 2;
  EXPECT(!decode(odd, payload));
  const ControlHeader header = header_of(good);
  EXPECT(!decode_control(std::as_bytes(std::span(&header, 1)).first(sizeof header - 1), {}));
  EXPECT(!decode_control({}, {}));
}

TEST("random bytes never break it") {
  Random random(7);
  for (int trial = 0; trial < 100000; ++trial) {
    std::vector<std::byte> header(random.below(8) == 0 ? random.below(64) : sizeof(ControlHeader));
    std::vector<std::byte> payload(random.below(3000));
    for (std::byte& byte : header) byte = static_cast<std::byte>(random.below(8));
    const auto control = decode_control(header, payload);
    if (control) EXPECT_EQ(control->calls.size() * sizeof(Call) + control->reason.size(), payload.size());
  }
}

}  // namespace
