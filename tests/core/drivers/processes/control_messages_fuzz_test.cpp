// The fuzzer's entry point without a fuzzer: control messages, greetings and identities, undamaged and damaged, and noise.
#include <random>
#include <span>
#include <string>
#include <vector>

#include "drivers/processes/control_wire.hpp"
#include "drivers/processes/job_key.hpp"
#include "drivers/processes/process_identity.hpp"
#include "fuzz/control_messages.hpp"
#include "fuzz_input.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using fuzz::append;
using fuzz::Input;

Input input_of(fuzz::ControlPart part, std::mt19937& random) {
  Input input{static_cast<std::uint8_t>(part)};
  if (part == fuzz::ControlPart::control) {
    Control control{.kind = static_cast<ControlKind>(1 + random() % 5), .source = 1, .epoch = static_cast<std::uint32_t>(random())};
    for (std::size_t calls = random() % 4; calls > 0; --calls) control.calls.push_back({.operation = Operation::allreduce});
    control.reason.assign(random() % 50, 'r');
    const ControlHeader header = header_of(control);
    const std::string payload = payload_of(control);
    append(input, std::as_bytes(std::span(&header, 1)));
    append(input, std::as_bytes(std::span(payload)));
  } else if (part == fuzz::ControlPart::greeting) {
    append(input, Greeting(JobKey(), 1, 2).say(std::vector<std::byte>(1 + random() % 90)));
  } else if (part == fuzz::ControlPart::identity) {
    std::vector<std::byte> bytes;
    ProcessIdentity{.pid = 7, .host = std::string(random() % 255, 'h')}.append_to(bytes);
    append(input, bytes);
  }
  return input;
}

TEST("undamaged messages are accepted, damaged ones refused or read as what they say") {
  std::mt19937 random(71);
  int refused = 0;
  constexpr int kRounds = 20'000;
  for (int round = 0; round < kRounds; ++round) {
    Input input = input_of(static_cast<fuzz::ControlPart>(random() % 3), random);
    EXPECT(fuzz::read_control_message(std::as_bytes(std::span(input))));
    for (std::size_t change = random() % 4; change > 0; --change) {
      input[1 + random() % (input.size() - 1)] = static_cast<std::uint8_t>(random());
    }
    if (random() % 4 == 0) input.resize(1 + random() % input.size());
    refused += fuzz::read_control_message(std::as_bytes(std::span(input))) ? 0 : 1;
  }
  EXPECT(refused > kRounds / 8);
  EXPECT(refused < kRounds);
}

TEST("noise ends every operation of a session") {
  std::mt19937 random(72);
  for (int round = 0; round < 2'000; ++round) {
    Input input(1 + random() % 600);
    fuzz::fill_with_noise(input, random, 2);
    if (round % 2 == 0) input[0] = static_cast<std::uint8_t>(fuzz::ControlPart::session);
    EXPECT_EQ(LLVMFuzzerTestOneInput(input.data(), input.size()), 0);
  }
}

}  // namespace
