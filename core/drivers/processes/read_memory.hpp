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
  void settle(std::uintptr_t block, std::uint64_t& until);

  bool enabled_;
  std::unordered_map<std::uintptr_t, std::uint64_t> bytes_until_;  // of each block, by its number
  unsigned failures_ = 0;                                          // one after the other
};

}  // namespace telegrad
