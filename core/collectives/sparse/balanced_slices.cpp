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
#include "base/check.hpp"
#include "codec/counted.hpp"
#include "collectives/dense/allgather_bruck.hpp"

namespace telegrad {

namespace {

struct Weighted {
  std::uint32_t index = 0;
  std::uint64_t entries = 0;
};

std::uint64_t place_of(std::uint64_t entries, std::size_t samples, std::size_t i) { return i * entries / samples; }

// ceil(part * total / parts), which the product alone might not fit.
std::uint64_t share_of(std::uint64_t total, std::size_t parts, std::size_t part) {
  return total / parts * part + (total % parts * part + parts - 1) / parts;
}

}  // namespace

template <class V>
void sample_indices(const SparseView<V>& view, std::span<std::uint32_t> into) {
  const std::size_t entries = view.nnz();
  for (std::size_t i = 0; i < into.size(); ++i) {
    const std::size_t place = place_of(entries, into.size(), i);
    const bool held = !view.dense && entries > 0;
    into[i] = held ? view.indices[place] : static_cast<std::uint32_t>(view.range.begin + place);
  }
}

const char* fault_of(const IndexSamples& samples, std::uint64_t dimension) {
  if (samples.entries > dimension) return "there are more entries than elements";
  if (samples.entries == 0) return "";
  if (!std::ranges::is_sorted(samples.indices)) return "the indices are not in order";
  return samples.indices.back() >= dimension ? "an index is outside of the vector" : "";
}

std::vector<std::uint64_t> balanced_lengths(std::uint64_t dimension, std::size_t parts,
                                            std::span<const IndexSamples> vectors) {
  std::vector<Weighted> samples;
  std::uint64_t total = 0;
  for (const IndexSamples& one : vectors) {
    const std::size_t count = one.indices.size();
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t entries = place_of(one.entries, count, i + 1) - place_of(one.entries, count, i);
      if (entries > 0) samples.push_back({one.indices[i], entries});
    }
    total += one.entries;
  }
  std::vector<std::uint64_t> lengths(parts);
  if (total == 0) {
    for (std::size_t part = 0; part < parts; ++part) lengths[part] = dimension / parts;
    lengths.back() += dimension % parts;
    return lengths;
  }
  std::ranges::sort(samples, {}, &Weighted::index);
  TELEGRAD_CHECK(samples.back().index < dimension);

  // Before an index there are, by the samples, at least as many entries as in fact: a part ends at the first index before
  // which there are enough. All samples of one index go to one part.
  std::uint64_t begin = 0;
  std::uint64_t before = 0;
  std::size_t next = 0;
  for (std::size_t part = 0; part + 1 < parts; ++part) {
    const std::uint64_t wanted = share_of(total, parts, part + 1);
    while (next < samples.size()) {
      if (before >= wanted && (next == 0 || samples[next].index != samples[next - 1].index)) break;
      before += samples[next++].entries;
    }
    const std::uint64_t end = next < samples.size() ? samples[next].index : dimension;
    lengths[part] = end - begin;
    begin = end;
  }
  lengths.back() = dimension - begin;
  return lengths;
}

#define TELEGRAD_INSTANTIATE(V) template void sample_indices(const SparseView<V>&, std::span<std::uint32_t>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

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
