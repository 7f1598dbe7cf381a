// Bruck's all-to-all: ceil(log2 P)(α + P/2·n·β), for any P. Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for
// all-to-all communications in multiport message-passing systems", IEEE Transactions on Parallel and Distributed Systems
// 8(11), 1997, §3.
//
// A block for the rank d ahead travels 2^i ahead in round i if bit i of d is set. Meanwhile it lies at place d; in the end
// what lies there has come from the rank d before. After the last round this rank has heard from all.
#include "collectives/dense/all_to_all_bruck.hpp"

#include "base/copy.hpp"
#include "collectives/support/elements.hpp"

namespace telegrad {
namespace {

// The blocks at places with this bit, to or from one message.
enum class Direction { pack, unpack };

void move_blocks(Direction direction, Bytes places, Bytes message, std::size_t block, Rank size, Rank bit) {
  if (block == 0) return;  // there may be no memory, not even for memcpy to leave alone
  std::byte* at = message.data();
  for (Rank place = bit; place < size; ++place) {
    if ((place & bit) == 0) continue;
    std::byte* const there = places.data() + place * block;
    if (direction == Direction::pack) {
      copy_bytes(at, there, block);
    } else {
      copy_bytes(there, at, block);
    }
    at += block;
  }
}

std::size_t places_with(Rank bit, Rank size) {
  std::size_t count = size / (2 * bit) * bit;
  if (const Rank rest = size % (2 * bit); rest > bit) count += rest - bit;
  return count;
}

}  // namespace

Task<void> all_to_all_bruck(Transport& net, ConstBytes input, Bytes output) {
  const Rank rank = net.rank();
  const Rank size = net.size();
  const std::size_t block = input.size() / size;
  const std::size_t before = rank * block;

  const Buffer places(input.size());
  co_await copy(net, input.subspan(before), places.bytes().first(input.size() - before));
  co_await copy(net, input.first(before), places.bytes().subspan(input.size() - before));

  const Buffer sent((size + 1) / 2 * block);
  const Buffer received(sent.size());
  Step step = 0;
  for (Rank bit = 1; bit < size; bit *= 2, ++step) {
    const std::size_t bytes = places_with(bit, size) * block;
    const Bytes leaves = sent.bytes().first(bytes);
    const Bytes comes = received.bytes().first(bytes);
    co_await net.compute(bytes, [&] { move_blocks(Direction::pack, places.bytes(), leaves, block, size, bit); });
    auto sending = net.send((rank + bit) % size, step, leaves);
    co_await net.receive((rank + size - bit) % size, step, comes);
    co_await net.compute(bytes, [&] { move_blocks(Direction::unpack, places.bytes(), comes, block, size, bit); });
    co_await sending;
  }
  if (block == 0) co_return;
  co_await compute_slices(net, size, block, [&](std::size_t begin, std::size_t end) {
    for (std::size_t place = begin; place < end; ++place) {
      const std::size_t source = (rank + size - place) % size;
      copy_bytes(output.data() + source * block, places.data() + place * block, block);
    }
  });
}

}  // namespace telegrad
