#pragma once
// Memory of this process that others of its host read, by the kernel's copies between processes: these go page by page, and take
// several times as long where pages are small. So what is read again and again is put into huge pages, block by block, as it stands.
// It's a matter of speed alone: what cannot be done is left as it is, and nobody hears of it.

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "base/types.hpp"

namespace telegrad {

class ReadMemory {
 public:
  /// `enabled`: false does nothing at all.
  explicit ReadMemory(bool enabled) : enabled_(enabled) {}

  /// `bytes` leave to be read where they lie.
  void leaves(ConstBytes bytes);

  static constexpr std::size_t kBlockBytes = std::size_t{2} << 20;  // a huge page
  static constexpr std::uint64_t kReadBefore = 3;                   // times: by then it is memory that stays

 private:
  struct Block {
    std::uint64_t bytes_left = kReadBefore * kBlockBytes;  // that are read until it is looked at
    std::uint64_t retry = 1;                               // times that it is read, if it is busy then
  };

  void settle(std::uintptr_t number, Block& block);

  bool enabled_;
  std::unordered_map<std::uintptr_t, Block> blocks_;  // by their numbers
  unsigned failures_ = 0;                             // one after the other
};

}  // namespace telegrad
