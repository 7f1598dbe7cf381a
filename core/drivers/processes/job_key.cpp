#include "drivers/processes/job_key.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>

#include "transport/failure.hpp"

namespace telegrad {
namespace {

constexpr const char* kKey = "TELEGRAD_JOB_KEY";
constexpr const char* kFile = "TELEGRAD_JOB_KEY_FILE";
constexpr const char* kIntegrity = "TELEGRAD_INTEGRITY";
constexpr std::size_t kKeyLeast = 32;
constexpr std::size_t kKeyMost = 4096;
constexpr const char* kMakeOne = "make one with `openssl rand -hex 32`, and give it to all ranks";
constexpr std::string_view kNoKey = "telegrad: payloads are checked, and nobody has a key";

void check_length(std::size_t length, const std::string& where) {
  if (length >= kKeyLeast && length <= kKeyMost) return;
  throw std::invalid_argument(where + " has " + std::to_string(length) + " characters, but a key has " +
                              std::to_string(kKeyLeast) + " to " + std::to_string(kKeyMost) + ": " + kMakeOne);
}

// Opened before it is looked at, so that both are the same file.
std::string read_key(const std::string& path) {
  const std::string where = std::string(kFile) + "=" + path;
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat status {};
  if (file < 0 || ::fstat(file, &status) != 0) {
    const std::string why = std::strerror(errno);
    if (file >= 0) ::close(file);
    throw std::invalid_argument(where + " cannot be read (" + why + "): name a file that this user can read on every host");
  }
  std::string text(kKeyMost + 2, '\0');
  const bool is_file = S_ISREG(status.st_mode);
  const bool is_own = status.st_uid == ::geteuid() || status.st_uid == 0;
  const bool is_private = (status.st_mode & (S_IRWXG | S_IRWXO)) == 0;
  const ssize_t length = is_file && is_own && is_private ? ::read(file, text.data(), text.size()) : 0;
  ::close(file);
  if (!is_file) throw std::invalid_argument(where + " is no regular file: " + kMakeOne);
  if (!is_own || !is_private) {
    std::array<char, 8> mode{};
    std::snprintf(mode.data(), mode.size(), "%04o", static_cast<unsigned>(status.st_mode & 07777));
    throw std::invalid_argument(where + (is_own ? " has mode " + std::string(mode.data()) + ", so others can read or write it: "
                                                : " belongs to another user: ") +
                                "give the file to the job's user, and set mode 0600 (chmod 600)");
  }
  text.resize(length > 0 ? static_cast<std::size_t>(length) : 0);
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  check_length(text.size(), where);
  return text;
}

// What stands before an address.
struct Opening {
  std::uint32_t epoch = 0;
  std::uint8_t is_keyed = 0;
  std::uint8_t checks_payloads = 0;
  std::uint16_t reserved = 0;
  Digest nonce{};
  Digest proof{};  // of all that stands before and behind it, and of who says it
};
static_assert(sizeof(Opening) == 72);

template <class Value>
ConstBytes bytes_of(const Value& value) {
  return std::as_bytes(std::span(&value, 1));
}

Digest proof_of(const JobKey& key, Rank rank, Rank size, Opening opening, ConstBytes address) {
  opening.proof = {};
  const std::array<Rank, 2> who{rank, size};
  constexpr std::string_view kPurpose = "telegrad join";
  return hmac_sha256(key.bytes(), {std::as_bytes(std::span(kPurpose)), bytes_of(who), bytes_of(opening), address});
}

}  // namespace

JobKey JobKey::of(std::string_view key, bool checks_payloads) {
  JobKey made;
  made.is_given_ = !key.empty();
  made.checks_payloads_ = checks_payloads;
  const auto bytes = std::as_bytes(std::span(key.empty() ? kNoKey : key));
  if (made.guards()) {
    require_cryptography(made.is_given_ ? kKey : kIntegrity);
    made.bytes_.assign(bytes.begin(), bytes.end());
  }
  return made;
}

JobKey JobKey::of_environment() {
  const char* const key = std::getenv(kKey);
  const char* const file = std::getenv(kFile);
  const char* const integrity = std::getenv(kIntegrity);
  const std::string_view checks = integrity == nullptr ? "0" : integrity;
  if (checks != "0" && checks != "1") {
    throw std::invalid_argument(std::string(kIntegrity) + "=" + std::string(checks) +
                                " must be 1 (payloads are checked) or 0 (they are not)");
  }
  if (key != nullptr && file != nullptr) {
    throw std::invalid_argument(std::string(kKey) + " and " + kFile + " are both set: unset one of them");
  }
  if (key != nullptr) check_length(std::strlen(key), kKey);
  return of(key != nullptr ? std::string(key) : file != nullptr ? read_key(file) : std::string(), checks == "1");
}

Greeting::Greeting(const JobKey& key, Rank rank, Rank size)
    : key_(key), rank_(rank), size_(size), epoch_(std::random_device{}()) {
  if (key.guards()) nonce_ = random_digest();
}

std::vector<std::byte> Greeting::say(ConstBytes address) const {
  Opening opening{.epoch = epoch_,
                  .is_keyed = key_.is_given(),
                  .checks_payloads = key_.checks_payloads(),
                  .nonce = nonce_};
  if (key_.guards()) opening.proof = proof_of(key_, rank_, size_, opening, address);
  std::vector<std::byte> blob(sizeof opening + address.size());
  std::memcpy(blob.data(), &opening, sizeof opening);
  std::ranges::copy(address, blob.begin() + sizeof opening);
  return blob;
}

void Greeting::hear(std::span<std::vector<std::byte>> blobs) {
  std::vector<Rank> without_key, with_key, checking, not_checking, other_key;
  nonces_.clear();
  for (Rank rank = 0; rank < blobs.size(); ++rank) {
    std::vector<std::byte>& blob = blobs[rank];
    Opening opening;
    if (blob.size() <= sizeof opening) throw std::invalid_argument("exchange returned a blob that is no address");
    std::memcpy(&opening, blob.data(), sizeof opening);
    blob.erase(blob.begin(), blob.begin() + sizeof opening);
    if (rank == 0) epoch_ = opening.epoch;
    // Not what comes back as this rank's own: with an old one, all could be of an old join.
    nonces_.push_back(rank == rank_ ? nonce_ : opening.nonce);
    const bool is_keyed = opening.is_keyed == 1, checks_payloads = opening.checks_payloads == 1;
    if (is_keyed != key_.is_given()) {
      (is_keyed ? with_key : without_key).push_back(rank);
    } else if (checks_payloads != key_.checks_payloads()) {
      (checks_payloads ? checking : not_checking).push_back(rank);
    } else if (key_.guards() && !same_bytes(proof_of(key_, rank, size_, opening, blob), opening.proof)) {
      other_key.push_back(rank);
    }
  }
  const std::string remedy = std::string("give all ranks the same ") + kKey + " or " + kFile;
  const std::string self = "rank " + std::to_string(rank_);
  if (!without_key.empty()) refuse(without_key, "no " + std::string(kKey) + ", and " + self + " has one: " + remedy);
  if (!with_key.empty()) refuse(with_key, "a " + std::string(kKey) + ", and " + self + " has none: " + remedy);
  if (!checking.empty()) refuse(checking, std::string(kIntegrity) + "=1, and " + self + " has 0: set it alike on all ranks");
  if (!not_checking.empty()) {
    refuse(not_checking, std::string(kIntegrity) + "=0, and " + self + " has 1: set it alike on all ranks");
  }
  if (!other_key.empty()) {
    refuse(other_key, "another " + std::string(kKey) + " than " + self + ", or somebody changed what they said: " + remedy);
  }
}

void Greeting::refuse(const std::vector<Rank>& ranks, const std::string& what) const {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (const Rank rank : ranks) text += (rank == ranks.front() ? "" : ", ") + std::to_string(rank);
  throw TransportError({.kind = FailureKind::transport,
                        .rank = rank_,
                        .peer = ranks.front(),
                        .operation = "join",
                        .reason = text + (ranks.size() == 1 ? " has " : " have ") + what});
}

// Both of a pair make the same secret, of both nonces, the epoch and both ranks.
std::shared_ptr<MessageGuard> Greeting::guard() const {
  if (!key_.guards()) return nullptr;
  constexpr std::string_view kPurpose = "telegrad pair";
  std::vector<Digest> secrets;
  for (Rank other = 0; other < nonces_.size(); ++other) {
    const Rank low = std::min(rank_, other), high = std::max(rank_, other);
    const std::array<std::uint32_t, 4> place{epoch_, size_, low, high};
    secrets.push_back(hmac_sha256(key_.bytes(), {std::as_bytes(std::span(kPurpose)), bytes_of(place), nonces_[low], nonces_[high]}));
  }
  return std::make_shared<MessageGuard>(rank_, secrets, key_.is_given(), key_.checks_payloads());
}

}  // namespace telegrad
