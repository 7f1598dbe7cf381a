// Reduce to a root. Binomial tree: ceil(log2 P)(α + nβ + nγ). Reduce-scatter and gather: (ceil(log2 P) + 1) α +
// 2(P−1)/P·nβ + (P−1)/P·nγ. Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in
// MPICH", Int. J. High Performance Computing Applications 19(1), 2005, §4.4; blocks go to the root straight, since all
// that they wait for is its port.
#include "collectives/dense/reduce.hpp"

#include <algorithm>
#include <deque>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "collectives/support/elements.hpp"
#include "collectives/support/halving.hpp"

namespace telegrad {
namespace {

// Where the costs above cross for α/β = 10 KB and γ = β. With two ranks only half of the work is saved. Below
// kLeastBlockBytes the root has more to do for a message than with what it says.
constexpr std::size_t kPairTreeBytes = std::size_t{32} << 10;
constexpr std::size_t kTreeBytes = std::size_t{16} << 10;
constexpr std::size_t kLeastBlockBytes = 256;

void check_lengths(const Transport& net, Rank root, DType dtype, ConstBytes input, Bytes output) {
  TELEGRAD_CHECK(root < net.size() && input.size() % size_of(dtype) == 0);
  TELEGRAD_CHECK(net.rank() != root || input.size() == output.size());
}

}  // namespace

bool reduces_by_tree(Rank size, std::size_t bytes) {
  return bytes < std::max(size == 2 ? kPairTreeBytes : kTreeBytes, kLeastBlockBytes * size);
}

// Seen from the root, rank v hears from v + 2^i for all 2^i below its lowest set bit, the nearest first, and then tells
// v without that bit. 16-bit floats that meet on a rank are added up in f32 and rounded once, as they leave it.
Task<void> reduce_tree(Transport& net, Rank root, DType dtype, Reduction reduction, ConstBytes input, Bytes output) {
  check_lengths(net, root, dtype, input, output);
  const Rank size = net.size();
  const Rank self = (net.rank() + size - root) % size;
  const auto rank_of = [&](Rank v) { return (v + root) % size; };
  // How many ranks' elements v tells the rank that is `distance` nearer to the root.
  const auto told_by = [&](Rank v, Rank distance) { return std::min(distance, size - v); };
  if (size == 1) {
    co_await copy(net, input, output);
    co_return;
  }
  const bool in_f32 = dtype == DType::f16 || dtype == DType::bf16;
  Buffer sum;
  Buffer received;
  Buffer addend;  // in f32
  ConstBytes mine = input;
  for (Rank distance = 1; distance < size; distance *= 2) {
    if ((self & distance) != 0) {
      if (in_f32 && !sum.empty()) {
        co_await narrow(net, dtype, reduction, sum.bytes(), received.bytes(), halvings_of(told_by(self, distance)));
        mine = received.bytes();
      }
      co_await net.send(rank_of(self - distance), 0, mine);
      co_return;
    }
    if (self + distance >= size) continue;
    if (received.empty()) received = Buffer(input.size());
    co_await net.receive(rank_of(self + distance), 0, received.bytes());
    if (in_f32) {
      if (sum.empty()) {
        sum = Buffer(2 * input.size());
        addend = Buffer(2 * input.size());
        const Partial own{input};
        co_await widen(net, dtype, reduction, own, sum.bytes());
      }
      const Partial told{received.bytes(), halvings_of(told_by(self + distance, distance))};
      co_await widen(net, dtype, reduction, told, addend.bytes());
      co_await reduce(net, DType::f32, reduction, sum.bytes(), addend.bytes());
      continue;
    }
    // The last one tells the root what it has not heard yet.
    const bool last = self == 0 && 2 * distance >= size;
    if (!last && sum.empty()) sum = Buffer(input.size());
    co_await reduce_to(net, dtype, reduction, mine, received.bytes(), last ? output : sum.bytes());
    mine = sum.bytes();
  }
  if (in_f32) {
    co_await finish_reduction(net, DType::f32, reduction, sum.bytes());
    co_await narrow(net, dtype, reduction, sum.bytes(), output, 0);
    co_return;
  }
  co_await finish_reduction(net, dtype, reduction, output);
}

Task<void> reduce_scatter_gather(Transport& net, Rank root, DType dtype, Reduction reduction, ConstBytes input,
                                 Bytes output) {
  check_lengths(net, root, dtype, input, output);
  const Rank rank = net.rank();
  const Rank size = net.size();
  if (size == 1) {
    co_await copy(net, input, output);
    co_return;
  }
  const Partition partition(input.size() / size_of(dtype), size);
  if (rank != root) {
    const Buffer mine(partition[rank].size() * size_of(dtype));
    co_await halve(net, dtype, reduction, input, partition, mine.bytes());
    co_await net.send(root, kHalvingSteps, mine.bytes());
    co_return;
  }
  const Bytes mine = elements(output, dtype, partition[rank]);
  co_await halve(net, dtype, reduction, input, partition, mine);
  std::deque<Transport::Receiving> receiving;
  for (Rank hops = 1; hops < size; ++hops) {
    const Rank from = (root + hops) % size;
    receiving.emplace_back(net, from, kHalvingSteps, elements(output, dtype, partition[from]));
  }
  for (auto& one : receiving) co_await one;
}

Task<void> reduce_to_root(Transport& net, Rank root, DType dtype, Reduction reduction, ConstBytes input, Bytes output) {
  return reduces_by_tree(net.size(), input.size())
             ? reduce_tree(net, root, dtype, reduction, input, output)
             : reduce_scatter_gather(net, root, dtype, reduction, input, output);
}

}  // namespace telegrad
