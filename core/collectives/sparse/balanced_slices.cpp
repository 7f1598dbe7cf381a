// Every rank shows all others some of its indices, evenly spaced among them, by Bruck's allgather, and all cut the range
// alike: ceil(log2 P)·α + P·s·4·β.
#include "collectives/sparse/balanced_slices.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "base/buffer.hpp"
#include "codec/counted.hpp"
#include "collectives/dense/allgather_bruck.hpp"
#include "collectives/sparse/balance.hpp"

namespace telegrad {
namespace {

constexpr Step kFirstStep = Step{3} << 30;
constexpr std::size_t kSamplesMost = std::size_t{64} << 10;  // of all ranks, but for the least of each
constexpr std::size_t kSamplesLeast = 16;

}  // namespace

std::size_t samples_per_rank(Rank size) {
  return std::min<std::size_t>(8 * size, std::max(kSamplesLeast, kSamplesMost / size));
}

template <class V>
Task<Partition> balanced_slices(Transport& net, const SparseVector<V>& mine) {
  const Rank size = net.size();
  const std::size_t samples = samples_per_rank(size);
  const std::size_t block = sizeof(std::uint64_t) + samples * sizeof(std::uint32_t);
  const std::uint64_t dimension = mine.dimension();
  if (size == 1) co_return Partition(static_cast<std::size_t>(dimension), size);
  const Buffer own(block);
  const Buffer all(block * size);
  const auto read = [&all, samples, block](Rank rank) {
    const std::byte* const at = all.data() + rank * block;
    IndexSamples found;
    std::memcpy(&found.entries, at, sizeof found.entries);
    found.indices = {reinterpret_cast<const std::uint32_t*>(at + sizeof found.entries), samples};
    return found;
  };
  if constexpr (!std::is_same_v<V, CountedF32>) {
    const std::uint64_t entries = mine.nnz();
    std::memcpy(own.data(), &entries, sizeof entries);
    sample_indices(mine.view(), {reinterpret_cast<std::uint32_t*>(own.data() + sizeof entries), samples});
  }
  co_await allgather_bruck(net, own.bytes(), all.bytes(), Partition(block * size, size), kFirstStep);
  if constexpr (std::is_same_v<V, CountedF32>) {
    co_return Partition(static_cast<std::size_t>(dimension), size);
  } else {
    std::vector<IndexSamples> found;
    for (Rank rank = 0; rank < size; ++rank) {
      found.push_back(read(rank));
      const std::string fault = fault_of(found.back(), dimension);
      if (!fault.empty()) {
        co_await net.fail(rank, "rank " + std::to_string(rank) + " sent damaged samples of its indices: " + fault);
      }
    }
    co_return Partition(std::span<const std::uint64_t>(balanced_lengths(dimension, size, found)));
  }
}

#define TELEGRAD_INSTANTIATE(V) template Task<Partition> balanced_slices(Transport&, const SparseVector<V>&);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
