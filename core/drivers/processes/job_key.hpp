#pragma once
// What the ranks of a job prove to each other, and how: the key that the environment gives them (TELEGRAD_JOB_KEY,
// TELEGRAD_JOB_KEY_FILE), whether payloads are checked (TELEGRAD_INTEGRITY), and what each says of both in its greeting.
// The key itself goes into no text, and to nobody.

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/types.hpp"
#include "drivers/processes/cryptography.hpp"
#include "drivers/processes/message_guard.hpp"

namespace telegrad {

class JobKey {
 public:
  JobKey() = default;  // none, and payloads are not checked
  /// Throws std::invalid_argument naming the variable that cannot be, and the remedy.
  static JobKey of_environment();
  static JobKey of(std::string_view key, bool checks_payloads);

  bool is_given() const { return is_given_; }
  bool checks_payloads() const { return checks_payloads_; }
  bool guards() const { return is_given_ || checks_payloads_; }
  ConstBytes bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
  bool is_given_ = false;
  bool checks_payloads_ = false;
};

/// One rank's part of a handshake. All ranks exchange what say() returns, once, and then hear() all of it.
class Greeting {
 public:
  Greeting(const JobKey& key, Rank rank, Rank size);

  /// The rank's address, with a new epoch and nonce, and the proof that it has the key.
  std::vector<std::byte> say(ConstBytes address) const;
  /// By rank; takes each address out of its blob. Throws TransportError naming the ranks that have another key or none, or
  /// check other payloads than this rank, and std::invalid_argument for a blob that is none.
  void hear(std::span<std::vector<std::byte>> blobs);

  /// Rank 0's; after hear().
  std::uint32_t epoch() const { return epoch_; }
  /// Of all messages from now on; null where there is no key and payloads are not checked. After hear().
  std::shared_ptr<MessageGuard> guard() const;

 private:
  [[noreturn]] void refuse(const std::vector<Rank>& ranks, const std::string& what) const;

  const JobKey& key_;
  Rank rank_;
  Rank size_;
  std::uint32_t epoch_;
  Digest nonce_{};
  std::vector<Digest> nonces_;  // by rank
};

}  // namespace telegrad
