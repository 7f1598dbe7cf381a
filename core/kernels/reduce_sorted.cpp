// Many sorted runs to one: block by block of the index range, so that the scratch stays in the second-level cache. Each
// input adds its entries of the block to a dense scratch and marks them in a bitmap; then the marked ones are packed.

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "kernels/merge.hpp"
#include "kernels/operations.hpp"

namespace telegrad::kernels {
namespace {

constexpr unsigned kBlockBits = 15;
constexpr std::uint32_t kBlock = 1U << kBlockBits;

template <class Operation, class V>
class BlockReduction {
 public:
  BlockReduction() : results_(kBlock) { std::fill(results_.begin(), results_.end(), kNeutral); }

  /// Adds the leading entries that lie in `block`; returns how many those are.
  std::size_t add(Entries<V> entries, std::uint32_t block) {
    const std::uint32_t* const indices = entries.indices.data();
    const V* const values = entries.values.data();
    V* const results = results_.data();
    std::size_t i = 0;
    for (; i < entries.size() && indices[i] >> kBlockBits == block; ++i) {
      const std::uint32_t place = indices[i] & (kBlock - 1U);
      results[place] = Operation::of(results[place], values[i]);
      marks_[place / 64] |= std::uint64_t{1} << (place % 64);
    }
    return i;
  }

  /// Packs what was added, ascending, behind the first `count` entries of `out`, and forgets it. Returns the new count.
  std::size_t pack(std::uint32_t block, EntriesOut<V> out, std::size_t count) {
    V* const results = results_.data();
    for (std::uint32_t word = 0; word < kBlock / 64; ++word) {
      std::uint64_t marks = marks_[word];
      if (marks == 0) continue;
      marks_[word] = 0;
      TELEGRAD_CHECK(count + static_cast<std::size_t>(std::popcount(marks)) <= out.capacity());
      for (; marks != 0; marks &= marks - 1) {
        const std::uint32_t place = word * 64 + static_cast<std::uint32_t>(std::countr_zero(marks));
        out.indices[count] = (block << kBlockBits) | place;
        out.values[count] = results[place];
        results[place] = kNeutral;
        ++count;
      }
    }
    return count;
  }

 private:
  static constexpr V kNeutral = Operation::template kNeutral<V>;

  Array<V> results_;
  std::array<std::uint64_t, kBlock / 64> marks_{};
};

// The lowest block in which an input still has an entry, or none.
template <class V>
std::uint32_t lowest_block(std::span<const Entries<V>> rest) {
  std::uint32_t lowest = std::numeric_limits<std::uint32_t>::max();
  for (const Entries<V>& entries : rest) {
    if (!entries.empty()) lowest = std::min(lowest, entries.indices.front() >> kBlockBits);
  }
  return lowest;
}

template <class V>
std::size_t reduce_by_merging(Reduction reduction, std::span<const Entries<V>> inputs, EntriesOut<V> out) {
  if (inputs.empty()) return 0;
  if (inputs.size() == 1) return merge(reduction, inputs[0], Entries<V>{}, out);
  if (inputs.size() == 2) return merge(reduction, inputs[0], inputs[1], out);
  const Array<std::uint32_t> indices(inputs[0].size() + inputs[1].size());
  const Array<V> values(indices.size());
  const std::size_t count = merge(reduction, inputs[0], inputs[1], EntriesOut<V>{indices.span(), values.span()});
  return merge(reduction, Entries<V>{indices.span().first(count), values.span().first(count)}, inputs[2], out);
}

template <class Operation, class V>
std::size_t reduce_by_blocks(std::span<const Entries<V>> inputs, EntriesOut<V> out) {
  std::vector<Entries<V>> rest(inputs.begin(), inputs.end());
  BlockReduction<Operation, V> reduced;
  std::size_t count = 0;
  for (;;) {
    const std::uint32_t block = lowest_block<V>(rest);
    if (block == std::numeric_limits<std::uint32_t>::max()) return count;
    for (Entries<V>& entries : rest) {
      const std::size_t taken = reduced.add(entries, block);
      entries = entries.subrun(taken, entries.size() - taken);
    }
    count = reduced.pack(block, out, count);
  }
}

}  // namespace

template <class V>
std::size_t reduce_sorted(Reduction reduction, std::span<const Entries<V>> inputs, EntriesOut<V> out) {
  TELEGRAD_CHECK(out.indices.size() == out.values.size());
  std::size_t total = 0;
  for (const Entries<V>& entries : inputs) total += entries.size();
  if (inputs.size() <= 3 && total <= out.capacity()) return reduce_by_merging(reduction, inputs, out);
  return on_operation(reduction, [&]<class Operation>(Operation) { return reduce_by_blocks<Operation>(inputs, out); });
}

namespace reference {

template <class V>
std::size_t reduce_sorted(Reduction reduction, std::span<const Entries<V>> inputs, EntriesOut<V> out) {
  std::size_t total = 0;
  for (const Entries<V>& entries : inputs) total += entries.size();
  Array<std::uint32_t> indices(total);
  Array<V> values(total);
  std::size_t count = 0;
  for (const Entries<V>& entries : inputs) {
    const Entries<V> so_far{indices.span().first(count), values.span().first(count)};
    Array<std::uint32_t> merged_indices(total);
    Array<V> merged_values(total);
    count = reference::merge(reduction, so_far, entries,
                             EntriesOut<V>{merged_indices.span(), merged_values.span()});
    indices = std::move(merged_indices);
    values = std::move(merged_values);
  }
  std::copy_n(indices.begin(), count, out.indices.begin());
  std::copy_n(values.begin(), count, out.values.begin());
  return count;
}

}  // namespace reference

#define TELEGRAD_INSTANTIATE(V)                                                                \
  template std::size_t reduce_sorted(Reduction, std::span<const Entries<V>>, EntriesOut<V>);   \
  template std::size_t reference::reduce_sorted(Reduction, std::span<const Entries<V>>, EntriesOut<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad::kernels
