#pragma once
// Gate: how an operation meets somebody who fills and takes its memory without a thread of this process: a stream of a
// GPU, whose copy engine writes a word of host memory once it has filled the input, and waits for another before it
// takes the output. Nobody is told that a word has changed; whoever runs the Session looks.

#include <atomic>
#include <cstdint>
#include <cstring>

#include "base/types.hpp"

namespace telegrad {

/// The words and the output are the caller's, who keeps them until the done word has its value.
struct Gate {
  std::uint32_t* ready = nullptr;  // null: open from the beginning
  std::uint32_t ready_value = 0;
  std::uint32_t* done = nullptr;  // null: nobody waits
  std::uint32_t done_value = 0;
  Bytes output{};  // what a failure fills; nothing that is written before the gate is open

  /// Values count up and may wrap round: at least ready_value.
  bool is_open() const {
    if (ready == nullptr) return true;
    const std::uint32_t value = std::atomic_ref(*ready).load(std::memory_order_acquire);
    return static_cast<std::int32_t>(value - ready_value) >= 0;
  }
  /// Makes the output something that cannot be taken for a result: NaN in every floating dtype, -1 in integers.
  void spoil() const {
    if (!output.empty()) std::memset(output.data(), 0xFF, output.size());
  }
  /// Lets whoever waits take the output.
  void release() const {
    if (done != nullptr) std::atomic_ref(*done).store(done_value, std::memory_order_release);
  }
};

}  // namespace telegrad
