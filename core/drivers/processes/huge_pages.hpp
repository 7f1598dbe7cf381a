#pragma once
// Memory of this process that others of its host read, by the kernel's copies between processes: these go page by page, and take
// several times as long where pages are small. So what is read again and again is put into huge pages as it stands. It's a matter of
// speed alone: what cannot be done is left as it is, and nobody hears of it.

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "base/types.hpp"

namespace telegrad {

class HugePages {
 public:
  /// `enabled`: false does nothing at all.
  explicit HugePages(bool enabled) : enabled_(enabled) {}

  /// Before another process reads `bytes` where they lie.
  void will_be_read(ConstBytes bytes);

  static constexpr std::size_t kBlockBytes = std::size_t{2} << 20;  // a huge page
  static constexpr std::uint64_t kReadBefore = 3;                   // times: by then it is memory that stays
  static constexpr std::size_t kAtOnce = 16;                        // blocks: 10 to 20 ms, in which nothing else moves
  static constexpr unsigned kFailuresMost = 8;  // one after the other: the system has no huge pages left, and looking takes time

 private:
  struct Block {
    std::uint64_t bytes_left = kReadBefore * kBlockBytes;  // that are read until it is moved
    std::uint64_t retry = 1;                               // times that it is read, if it is busy then
    std::size_t begin = kBlockBytes;                       // of what has been read of it
    std::size_t end = 0;

    // What lies beside an array is not touched.
    bool is_due(std::uint64_t within) const { return begin == 0 && end == kBlockBytes && bytes_left <= within; }
  };

  bool is_due(std::uintptr_t number, std::uint64_t within) const;
  void settle(std::uintptr_t number);

  bool enabled_;
  std::unordered_map<std::uintptr_t, Block> blocks_;  // by their numbers
  unsigned failures_ = 0;
};

}  // namespace telegrad
