// What proves itself is taken once; what was changed, comes again, or is of another pair or key is not.
#include <span>
#include <string>
#include <vector>

#include "drivers/processes/job_key.hpp"
#include "drivers/processes/message_guard.hpp"
#include "testing.hpp"
#include "transport/failure.hpp"

namespace {

using namespace telegrad;
using Blobs = std::vector<std::vector<std::byte>>;

constexpr const char* kKey = "a key that has 32 characters, or more";

ConstBytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// Three ranks that have joined.
std::vector<std::shared_ptr<MessageGuard>> joined(bool checks_payloads) {
  const JobKey key = JobKey::of(kKey, checks_payloads);
  std::vector<Greeting> greetings;
  Blobs said;
  for (Rank rank = 0; rank < 3; ++rank) said.push_back(greetings.emplace_back(key, rank, 3).say(bytes_of("an address")));
  std::vector<std::shared_ptr<MessageGuard>> guards;
  for (Greeting& greeting : greetings) {
    Blobs heard = said;
    greeting.hear(heard);
    EXPECT(std::ranges::equal(heard[1], bytes_of("an address")));
    guards.push_back(greeting.guard());
  }
  return guards;
}

TEST("HMAC-SHA-256 and GMAC are those of the standards") {
  require_cryptography("the test");
  const Digest digest = hmac_sha256(bytes_of("Jefe"), {bytes_of("what do ya want "), bytes_of("for nothing?")});  // RFC 4231, 2
  EXPECT(digest[0] == std::byte{0x5b} && digest[1] == std::byte{0xdc} && digest[31] == std::byte{0x43});
  Mac mac(Digest{});  // GCM's test case 13: nothing, under a key and an IV of zeros
  const Tag tag = mac.tag(0, {}, {});
  EXPECT(tag[0] == std::byte{0x53} && tag[1] == std::byte{0x0f} && tag[15] == std::byte{0x8b});
}

TEST("a control message opens once, for its receiver alone") {
  const auto guards = joined(false);
  const Seal seal = guards[0]->seal(1, bytes_of("header"), bytes_of("payload"));
  EXPECT(!guards[1]->opens(0, bytes_of("headex"), bytes_of("payload"), seal));
  EXPECT(!guards[1]->opens(0, bytes_of("header"), bytes_of("payloax"), seal));
  EXPECT(!guards[1]->opens(2, bytes_of("header"), bytes_of("payload"), seal));
  EXPECT(!guards[2]->opens(0, bytes_of("header"), bytes_of("payload"), seal));
  EXPECT(!guards[0]->opens(1, bytes_of("header"), bytes_of("payload"), seal));  // not back to its sender
  EXPECT(!guards[1]->opens(99, bytes_of("header"), bytes_of("payload"), seal));
  Seal renumbered = seal;
  ++renumbered.number;
  EXPECT(!guards[1]->opens(0, bytes_of("header"), bytes_of("payload"), renumbered));
  EXPECT(guards[1]->opens(0, bytes_of("header"), bytes_of("payload"), seal));
  EXPECT(!guards[1]->opens(0, bytes_of("header"), bytes_of("payload"), seal));
}

TEST("no seal is good after another join of the same ranks with the same key") {
  const auto before = joined(false), after = joined(false);
  const Seal seal = before[0]->seal(1, bytes_of("header"), {});
  EXPECT(!after[1]->opens(0, bytes_of("header"), {}, seal));
  EXPECT(!after[1]->is_of(0, before[0]->prove(1, {}, {}).word));
  EXPECT(!after[1]->opens_connection(0, bytes_of("opening"), before[0]->seal_connection(1, bytes_of("opening"))));
}

TEST("data carries the word of its pair, and its payload is checked where that is asked for") {
  for (const bool checks : {false, true}) {
    const auto guards = joined(checks);
    const DataProof proof = guards[0]->prove(1, bytes_of("envelope"), bytes_of("payload"));
    EXPECT(guards[1]->is_of(0, proof.word));
    EXPECT(!guards[1]->is_of(2, proof.word) && !guards[2]->is_of(0, proof.word) && !guards[0]->is_of(1, proof.word));
    EXPECT(!guards[1]->is_of(1, proof.word) && !guards[1]->is_of(99, proof.word));
    EXPECT_EQ(guards[1]->data_proof_bytes(), checks ? 32 : 8);
    if (!checks) continue;
    EXPECT(guards[1]->is_whole(0, bytes_of("envelope"), bytes_of("payload"), proof));
    EXPECT(!guards[1]->is_whole(0, bytes_of("envelope"), bytes_of("paYload"), proof));
    EXPECT(!guards[1]->is_whole(0, bytes_of("Envelope"), bytes_of("payload"), proof));
  }
}

TEST("a number counts once, and a few may overtake others") {
  ReplayWindow window;
  EXPECT(!window.take(0));
  for (const std::uint64_t number : {3U, 1U, 2U, 70U, 8U, 69U}) EXPECT(window.take(number));
  for (const std::uint64_t number : {3U, 1U, 2U, 70U, 8U, 69U, 6U}) EXPECT(!window.take(number));  // 6 is too old to tell
  EXPECT(window.take(7));
  EXPECT(window.take(1'000'000) && !window.take(1'000'000) && !window.take(9));
}

TEST("an exchange that returns an old greeting in a rank's own place makes no old keys") {
  const JobKey key = JobKey::of(kKey, false);
  Greeting old_0(key, 0, 2), old_1(key, 1, 2), now(key, 0, 2);
  const Blobs old{old_0.say(bytes_of("a")), old_1.say(bytes_of("b"))};
  Blobs heard = old, again = old;
  old_1.hear(heard);
  now.hear(again);
  EXPECT(!now.guard()->opens(1, bytes_of("header"), {}, old_1.guard()->seal(0, bytes_of("header"), {})));
}

TEST("a greeting whose address, epoch or rank was changed is refused") {
  const JobKey key = JobKey::of(kKey, false);
  Greeting one(key, 0, 2);
  const Greeting other(key, 1, 2);
  const Blobs said{one.say(bytes_of("first")), other.say(bytes_of("second"))};
  for (const std::size_t at : {0U, 10U, 50U, 73U}) {
    Blobs heard = said;
    heard[1][at] ^= std::byte{1};
    EXPECT_THROWS(TransportError, "rank 1 has another TELEGRAD_JOB_KEY than rank 0", one.hear(heard));
  }
  Blobs swapped{said[0], said[0]};
  EXPECT_THROWS(TransportError, "rank 1 has another", one.hear(swapped));
}

}  // namespace
