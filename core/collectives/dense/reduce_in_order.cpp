// Reductions that the caller gives. They may not commute, and floats do not add associatively: so the order of evaluation is
// fixed, from rank 0 to rank P − 1, whatever the number of elements.
//
// 1. Each rank gets all ranks' elements of its block: an all_to_all of (P−1)/P·n bytes.
// 2. It combines them in the order of ranks: (P−1)/P·n elements.
// 3. Results are gathered: another (P−1)/P·n bytes, to all, to the root, or not at all.
// An allreduce of few bytes gathers all inputs instead, and each rank combines them all: ceil(log2 P) messages.
#include "collectives/dense/reduce_in_order.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "collectives/dense/all_to_all.hpp"
#include "collectives/dense/allgather.hpp"
#include "collectives/dense/gather.hpp"
#include "collectives/support/elements.hpp"
#include "transport/group_transport.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kGatheredMost = 1024;  // bytes of an input
constexpr Step kBehind = Step{1} << 30;

Partition in_bytes(const Partition& elements, std::size_t element) {
  std::vector<std::uint64_t> lengths;
  for (std::size_t block = 0; block < elements.blocks(); ++block) lengths.push_back(elements[block].size() * element);
  return Partition(std::span<const std::uint64_t>(lengths));
}

Partition alike(std::size_t bytes, Rank size) {
  return Partition(std::span<const std::uint64_t>(std::vector<std::uint64_t>(size, bytes)));
}

GroupTransport behind(Transport& net) { return all_from_step(net, kBehind, kBehind); }

// The first of `blocks`, each of `bytes` bytes, becomes what all of them combined are.
Task<void> combine_blocks(Transport& net, const GivenReduction& how, Bytes blocks, std::size_t bytes) {
  for (Rank rank = 1; rank < net.size(); ++rank) {
    std::byte* const into = blocks.data();
    const std::byte* const from = blocks.data() + rank * bytes;
    co_await compute_slices(net, bytes / how.element, how.element, [&how, into, from](std::size_t begin, std::size_t end) {
      how.combine(into + begin * how.element, from + begin * how.element, end - begin);
    });
  }
}

}  // namespace

Task<void> reduce_scatter_in_order(Transport& net, const GivenReduction& how, ConstBytes input, const Partition& partition,
                                   Bytes mine) {
  const std::size_t own = partition[net.rank()].size() * how.element;
  TELEGRAD_CHECK(input.size() == partition.count() * how.element && mine.size() == own);
  Buffer blocks(own * net.size());
  co_await all_to_all_v(net, input, blocks.bytes(), in_bytes(partition, how.element), alike(own, net.size()));
  co_await combine_blocks(net, how, blocks.bytes(), own);
  co_await copy(net, blocks.bytes().first(own), mine);
}

Task<void> allreduce_in_order(Transport& net, const GivenReduction& how, ConstBytes input, Bytes output) {
  TELEGRAD_CHECK(input.size() == output.size() && input.size() % how.element == 0);
  const Rank size = net.size();
  if (input.size() <= kGatheredMost) {
    Buffer all(input.size() * size);
    co_await allgather(net, input, all.bytes(), alike(input.size(), size));
    co_await combine_blocks(net, how, all.bytes(), input.size());
    co_await copy(net, all.bytes().first(input.size()), output);
    co_return;
  }
  const Partition partition(input.size() / how.element, size);
  Buffer mine(partition[net.rank()].size() * how.element);
  co_await reduce_scatter_in_order(net, how, input, partition, mine.bytes());
  GroupTransport later = behind(net);
  co_await allgather(later, mine.bytes(), output, in_bytes(partition, how.element));
}

Task<void> reduce_in_order(Transport& net, const GivenReduction& how, Rank root, ConstBytes input, Bytes output) {
  const Partition partition(input.size() / how.element, net.size());
  Buffer mine(partition[net.rank()].size() * how.element);
  co_await reduce_scatter_in_order(net, how, input, partition, mine.bytes());
  GroupTransport later = behind(net);
  co_await gather(later, root, mine.bytes(), output, in_bytes(partition, how.element));
}

}  // namespace telegrad
