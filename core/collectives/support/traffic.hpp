#pragma once
// What a sparse collective has moved on this rank, in the measure of its paper: an index is a word, a value is one. In
// fewer bits they are still as many words.

#include <cstdint>

namespace telegrad {

struct SparseTraffic {
  std::uint64_t entries_sent = 0;  // an index and a value each
  std::uint64_t entries_received = 0;
  std::uint64_t control_bytes_sent = 0;  // what is neither: counts
  std::uint64_t control_bytes_received = 0;
};

}  // namespace telegrad
