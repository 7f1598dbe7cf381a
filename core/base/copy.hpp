#pragma once
// Copies of what may be long.

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace telegrad {

/// memcpy(), but for a pitfall: of a few KiB and more glibc makes `rep movsb`, for which Zen 3 and 4 take fifteen times as long
/// where the destination lies, within its page, 1 to 31 bytes behind where the source lies in its own. Then it goes by vectors.
inline void copy_bytes(void* to, const void* from, std::size_t size) {
  constexpr std::uintptr_t kPage = 4096;
  constexpr std::uintptr_t kBehindMost = 31;
  struct Line {
    std::byte bytes[64];
  };
  const std::uintptr_t behind = (reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from)) % kPage;
  auto* into = static_cast<std::byte*>(to);
  const auto* out_of = static_cast<const std::byte*>(from);
  if (behind != 0 && behind <= kBehindMost) {
    for (; size >= sizeof(Line); size -= sizeof(Line), into += sizeof(Line), out_of += sizeof(Line)) {
      Line line;
      std::memcpy(&line, out_of, sizeof line);
      std::memcpy(into, &line, sizeof line);
    }
  }
  if (size > 0) std::memcpy(into, out_of, size);
}

/// A vector of so many bytes does not stay in the caches until somebody reads it.
inline constexpr std::size_t kPastCachesBytes = std::size_t{4} << 20;

/// Copies past the caches, which costs memory half the traffic: lines that are written whole are not read first. For what lies in
/// the caches and goes where it will not be read soon. Other threads find it there after settle_past_caches().
inline void copy_past_caches(void* to, const void* from, std::size_t size) {
  auto* into = static_cast<std::byte*>(to);
  const auto* out_of = static_cast<const std::byte*>(from);
#ifdef __SSE2__
  constexpr std::size_t kLine = 64;
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (size >= head + kLine) {
    std::memcpy(into, out_of, head);
    into += head, out_of += head, size -= head;
    for (; size >= kLine; size -= kLine, into += kLine, out_of += kLine) {
      for (std::size_t at = 0; at < kLine; at += sizeof(__m128i)) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(into + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(out_of + at)));
      }
    }
  }
#endif
  copy_bytes(into, out_of, size);
}
inline void settle_past_caches() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace telegrad
