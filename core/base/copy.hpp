#pragma once
// Copies of what may be long.

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace telegrad {

/// memcpy(), but for a pitfall: of a few KiB and more glibc makes `rep movsb`, for which a Zen 3 takes fifteen times as long
/// where the destination lies, within its page, 1 to 31 bytes behind where the source lies in its own. Then it goes by vectors.
inline void copy_bytes(void* to, const void* from, std::size_t size) {
  constexpr std::uintptr_t kPage = 4096;
  constexpr std::uintptr_t kBehindMost = 31;
  struct Words {
    std::uint64_t first, second;
  };
  const std::uintptr_t behind = (reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from)) % kPage;
  auto* into = static_cast<std::byte*>(to);
  const auto* out_of = static_cast<const std::byte*>(from);
  if (behind != 0 && behind <= kBehindMost) {
    for (; size >= sizeof(Words); size -= sizeof(Words), into += sizeof(Words), out_of += sizeof(Words)) {
      Words words;
      std::memcpy(&words, out_of, sizeof words);
      std::memcpy(into, &words, sizeof words);
    }
  }
  if (size > 0) std::memcpy(into, out_of, size);
}

}  // namespace telegrad
