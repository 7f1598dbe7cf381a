#pragma once
// The primitives that authenticate a job: HMAC-SHA-256 and AES-256-GMAC (NIST SP 800-38D) of OpenSSL's libcrypto, 1.1 or 3.
// It is found when a job first needs it, so that neither building nor jobs without a key need OpenSSL.

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>

#include "base/types.hpp"

namespace telegrad {

using Digest = std::array<std::byte, 32>;
using Tag = std::array<std::byte, 16>;

/// Throws std::invalid_argument saying what to install where there is no libcrypto; `wanted_by` is what needs it.
void require_cryptography(const char* wanted_by);

/// After require_cryptography(), like all below. Of all parts, one after the other. Throws std::runtime_error.
Digest hmac_sha256(ConstBytes key, std::initializer_list<ConstBytes> parts);
/// In a time that does not depend on where they differ.
bool same_bytes(ConstBytes a, ConstBytes b);
/// Of the kernel. Throws std::runtime_error.
Digest random_digest();

/// One direction between two ranks. No two messages of a key may have the same number.
class Mac {
 public:
  explicit Mac(const Digest& key);
  /// Of both parts, one after the other.
  Tag tag(std::uint64_t number, ConstBytes first, ConstBytes second);

 private:
  std::shared_ptr<void> context_;
};

}  // namespace telegrad
