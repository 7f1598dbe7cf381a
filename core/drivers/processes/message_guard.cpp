#include "drivers/processes/message_guard.hpp"

#include <unistd.h>

#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

namespace telegrad {
namespace {

// Of one purpose and one direction.
Digest key_of(const Digest& secret, std::string_view purpose, Rank from, Rank to) {
  const std::array<Rank, 2> direction{from, to};
  return hmac_sha256(secret, {std::as_bytes(std::span(purpose)), std::as_bytes(std::span(direction))});
}

std::uint64_t word_of(const Digest& secret, Rank from, Rank to) {
  const Digest digest = key_of(secret, "telegrad word", from, to);
  std::uint64_t word = 0;
  std::memcpy(&word, digest.data(), sizeof word);
  return word;
}

// Heartbeats must not wait for a slow terminal.
void tell(std::string line) {
  try {
    std::thread([line = std::move(line)] { [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size()); })
        .detach();
  } catch (const std::system_error&) {
    // No thread to be had: the counter still tells.
  }
}

}  // namespace

bool ReplayWindow::take(std::uint64_t number) {
  if (number == 0) return false;
  if (number > highest_) {
    const std::uint64_t ahead = number - highest_;
    seen_ = ahead < kWidth ? seen_ << ahead | 1 : 1;
    highest_ = number;
    return true;
  }
  const std::uint64_t back = highest_ - number;
  if (back >= kWidth || (seen_ >> back & 1) != 0) return false;
  seen_ |= std::uint64_t{1} << back;
  return true;
}

MessageGuard::Peer::Peer(const Digest& secret, Rank self, Rank other)
    : control_out(key_of(secret, "telegrad control", self, other)),
      control_in(key_of(secret, "telegrad control", other, self)),
      data_out(key_of(secret, "telegrad data", self, other)),
      data_in(key_of(secret, "telegrad data", other, self)),
      connection_out(key_of(secret, "telegrad connection", self, other)),
      connection_in(key_of(secret, "telegrad connection", other, self)),
      word_out(word_of(secret, self, other)),
      word_in(word_of(secret, other, self)) {}

MessageGuard::MessageGuard(Rank rank, const std::vector<Digest>& secrets, bool is_keyed, bool checks_payloads)
    : rank_(rank), is_keyed_(is_keyed), checks_payloads_(checks_payloads) {
  peers_.reserve(secrets.size());
  for (Rank other = 0; other < secrets.size(); ++other) peers_.emplace_back(secrets[other], rank, other);
}

Seal MessageGuard::seal(Rank to, ConstBytes header, ConstBytes payload) {
  Peer& peer = peers_[to];
  const std::uint64_t number = ++peer.sent_controls;
  return {number, peer.control_out.tag(number, header, payload)};
}

// The number counts once the MAC has proven it, or a stranger could use numbers up.
bool MessageGuard::opens(Rank from, ConstBytes header, ConstBytes payload, const Seal& seal) {
  if (from >= peers_.size() || from == rank_) return false;
  Peer& peer = peers_[from];
  return same_bytes(peer.control_in.tag(seal.number, header, payload), seal.tag) && peer.controls.take(seal.number);
}

Seal MessageGuard::seal_connection(Rank to, ConstBytes opening) {
  Peer& peer = peers_[to];
  const std::uint64_t number = ++peer.made_connections;
  return {number, peer.connection_out.tag(number, opening, {})};
}

bool MessageGuard::opens_connection(Rank from, ConstBytes opening, const Seal& seal) {
  if (from >= peers_.size() || from == rank_) return false;
  Peer& peer = peers_[from];
  return same_bytes(peer.connection_in.tag(seal.number, opening, {}), seal.tag) && peer.connections.take(seal.number);
}

DataProof MessageGuard::prove(Rank to, ConstBytes envelope, ConstBytes payload) {
  Peer& peer = peers_[to];
  DataProof proof{.word = peer.word_out};
  if (checks_payloads_) {
    proof.seal.number = ++peer.sent_messages;
    proof.seal.tag = peer.data_out.tag(proof.seal.number, envelope, payload);
  }
  return proof;
}

bool MessageGuard::is_whole(Rank from, ConstBytes envelope, ConstBytes payload, const DataProof& proof) {
  return same_bytes(peers_[from].data_in.tag(proof.seal.number, envelope, payload), proof.seal.tag);
}

void MessageGuard::refuse() {
  if (refused_++ != 0) return;
  tell("telegrad: rank " + std::to_string(rank_) + " refused a connection or message that " +
       (is_keyed_ ? "does not prove TELEGRAD_JOB_KEY: a stranger, or another job, has connected to it"
                  : "was damaged on its way, or is a stranger's") +
       "; stats()[\"messages_refused\"] counts further ones\n");
}

}  // namespace telegrad
