#pragma once
// Proves each message to its receiver, by keys that two ranks have made from the job's key and their nonces.
// A control message carries a number and a MAC over all of it. A message of data carries a word that only its two ranks
// know; where payloads are checked, also a number and a MAC over envelope and payload. What does not prove itself is a
// stranger's: it is counted, and the first is told to the user.

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "base/types.hpp"
#include "drivers/processes/cryptography.hpp"

namespace telegrad {

/// Behind a control message's header.
struct Seal {
  std::uint64_t number = 0;
  Tag tag{};
};
static_assert(sizeof(Seal) == 24);

/// Behind an envelope: only `word`, unless payloads are checked.
struct DataProof {
  std::uint64_t word = 0;
  Seal seal{};
};
static_assert(sizeof(DataProof) == 32);

/// Of the numbers that have come, so that none counts twice; a few may overtake others.
class ReplayWindow {
 public:
  /// False: it has come, or is too old to tell. Numbers begin with 1.
  bool take(std::uint64_t number);

 private:
  static constexpr std::uint64_t kWidth = 64;
  std::uint64_t highest_ = 0;
  std::uint64_t seen_ = 0;  // bit i: highest_ - i has come
};

class MessageGuard {
 public:
  /// `secrets`: what this rank shares with each other, by rank. They differ for each pair, and from one join to the next.
  MessageGuard(Rank rank, const std::vector<Digest>& secrets, bool is_keyed, bool checks_payloads);

  bool checks_payloads() const { return checks_payloads_; }
  std::size_t data_proof_bytes() const { return checks_payloads_ ? sizeof(DataProof) : sizeof(std::uint64_t); }

  Seal seal(Rank to, ConstBytes header, ConstBytes payload);
  /// False: it is a stranger's, was changed, or has come before.
  bool opens(Rank from, ConstBytes header, ConstBytes payload, const Seal& seal);

  /// The same of a TCP connection, for any thread, one at a time.
  Seal seal_connection(Rank to, ConstBytes opening);
  bool opens_connection(Rank from, ConstBytes opening, const Seal& seal);

  DataProof prove(Rank to, ConstBytes envelope, ConstBytes payload);
  /// Whether it is of that rank; its payload may still be anything.
  bool is_of(Rank from, std::uint64_t word) const { return from < peers_.size() && from != rank_ && peers_[from].word_in == word; }
  bool is_whole(Rank from, ConstBytes envelope, ConstBytes payload, const DataProof& proof);

  /// Counts a stranger's message or connection, and tells the first; for any thread.
  void refuse();
  std::uint64_t refused() const { return refused_; }

 private:
  struct Peer {
    explicit Peer(const Digest& secret, Rank self, Rank other);
    Mac control_out, control_in, data_out, data_in, connection_out, connection_in;
    std::uint64_t word_out, word_in;
    std::uint64_t sent_controls = 0;
    std::uint64_t sent_messages = 0;
    std::uint64_t made_connections = 0;
    ReplayWindow controls{}, connections{};
  };

  Rank rank_;
  bool is_keyed_;
  bool checks_payloads_;
  std::vector<Peer> peers_;  // this rank's own is not used
  std::atomic<std::uint64_t> refused_ = 0;
};

}  // namespace telegrad
