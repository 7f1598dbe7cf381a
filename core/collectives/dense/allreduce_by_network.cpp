// Allreduce by the network's own collective, such as MPI_Iallreduce. The idea of choosing another library's where it is the
// best: Dryden et al., "Aluminum: An Asynchronous, GPU-Aware Communication Library Optimized for Large-Scale Training of
// Deep Neural Networks on HPC Systems", MLHPC 2018, §IV.
//
// 1. A barrier in which ranks compare their calls: MPI itself may hang or crash where calls differ or a rank never comes.
// 2. The collective, on memory of our own: it cannot be cancelled, and after a failure it may go on writing.
// 3. Of floats: NaN becomes telegrad's own, and ranks compare a digest, since MPI asks for equal bits and does not check
//    them. Where they differ, all take rank 0's result.
// Beside the network's bytes: 2 copies of n bytes, and 2·ceil(log2 P) messages of at most 16 bytes.
#include "collectives/dense/allreduce_by_network.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "collectives/dense/barrier.hpp"
#include "collectives/dense/broadcast.hpp"
#include "collectives/support/elements.hpp"
#include "kernels/reduce.hpp"
#include "transport/group_transport.hpp"

namespace telegrad {
namespace {

constexpr Step kDigests = 32, kRepair = 64;
constexpr Step kRepairMost = Step{1} << 20;

// Four lanes, each a bijection of what it was for every word: two vectors that differ in one word of a lane never agree.
class Digest {
 public:
  void add(ConstBytes bytes) {
    std::size_t at = 0;
    for (; at + sizeof lanes_ <= bytes.size(); at += sizeof lanes_) {
      std::array<std::uint64_t, 4> words;
      std::memcpy(words.data(), bytes.data() + at, sizeof words);
      for (std::size_t lane = 0; lane < 4; ++lane) mix(lanes_[lane], words[lane]);
    }
    for (; at < bytes.size(); ++at) mix(lanes_[0], static_cast<std::uint64_t>(bytes[at]));
  }
  std::uint64_t value() const {
    std::uint64_t all = 0;
    for (const std::uint64_t lane : lanes_) mix(all, lane);
    return all;
  }

 private:
  static void mix(std::uint64_t& lane, std::uint64_t word) {
    lane = (lane ^ word) * 0x9e3779b97f4a7c15;
    lane ^= lane >> 29;
  }
  std::array<std::uint64_t, 4> lanes_{1, 2, 3, 4};
};

// By dissemination, of the least and the greatest digest: whoever comes twice changes neither.
Task<bool> all_the_same(Transport& net, std::uint64_t digest) {
  std::array<std::uint64_t, 2> known{digest, digest}, heard{};
  Step step = kDigests;
  const Rank rank = net.rank(), size = net.size();
  for (Rank distance = 1; distance < size; distance *= 2, ++step) {
    const auto told = known;
    auto sending = net.send((rank + distance) % size, step, std::as_bytes(std::span(told)));
    co_await net.receive((rank + size - distance) % size, step, std::as_writable_bytes(std::span(heard)));
    known = {std::min(known[0], heard[0]), std::max(known[1], heard[1])};
    co_await sending;
  }
  co_return known[0] == known[1];
}

}  // namespace

Task<void> allreduce_by_network(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Bytes output) {
  TELEGRAD_CHECK(input.size() == output.size() && input.size() % size_of(dtype) == 0);
  const bool alone = net.size() == 1 || input.empty();
  const std::uint64_t turn = alone ? 0 : net.take_turn();  // as it begins: before anything is awaited
  Buffer values(input.size());
  co_await copy(net, input, values.bytes());
  co_await barrier(net);
  if (!alone) {
    co_await net.reduce_by_network(turn, dtype, reduction == Reduction::avg ? Reduction::sum : reduction, values);
  }
  if (dtype == DType::f32 || dtype == DType::f64) {
    Digest digest;
    const std::size_t element = size_of(dtype);
    co_await compute_slices(net, values.size() / element, element, [&](std::size_t begin, std::size_t end) {
      const Bytes slice = elements(values.bytes(), dtype, Range{begin, end});
      kernels::reduce_to(dtype, Reduction::max, slice, slice, slice);  // changes NaN alone
      digest.add(slice);
    });
    if (!co_await all_the_same(net, digest.value())) {
      GroupTransport behind = all_from_step(net, kRepair, kRepairMost);
      co_await broadcast(behind, 0, values.bytes());
    }
  }
  co_await finish_reduction(net, dtype, reduction, values.bytes());
  co_await copy(net, values.bytes(), output);
}

}  // namespace telegrad
