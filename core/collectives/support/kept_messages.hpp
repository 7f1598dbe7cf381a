#pragma once
// Messages kept until all have come, in the order in which they came. Small ones are copied one behind the other: each
// takes little more than its bytes, and reading thousands of them is one walk through memory.
// What they say, it must not know.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "base/buffer.hpp"
#include "base/types.hpp"

namespace telegrad {

class KeptMessages {
 public:
  /// Returns where its bytes are from now on, at a multiple of 8. They stay there when this object moves.
  ConstBytes add(Rank source, Buffer message);
  /// By source, of `size` ranks; `missing` where add() was not called.
  std::vector<ConstBytes> by_source(Rank size, ConstBytes missing = {}) const;

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Record {
    ConstBytes bytes;
    Rank source;
    std::uint32_t step;  // in bytes to the next record of the block; 0: there is none, nor a message
  };
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };
  using Block = std::unique_ptr<std::byte, Free>;
  std::byte* take(std::size_t bytes);
  void begin_block();

  // In the last block.
  std::byte* next_ = nullptr;
  std::size_t left_ = 0;
  std::size_t block_bytes_ = 0;
  std::vector<Block> blocks_;
  std::vector<Buffer> large_;
};

}  // namespace telegrad
