// Dissemination barrier: in round i every rank tells the one 2^i ahead, and so has heard of 2^(i+1) ranks.
// Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", Int. J. Parallel Programming 17(1), 1988, §3.
#include "collectives/dense/barrier.hpp"

namespace telegrad {

Task<void> barrier(Transport& net, Step first_step) {
  const Rank rank = net.rank();
  const Rank size = net.size();
  Step step = first_step;
  for (Rank distance = 1; distance < size; distance *= 2, ++step) {
    auto sending = net.send((rank + distance) % size, step, {});
    co_await net.receive((rank + size - distance) % size, step, {});
    co_await sending;
  }
}

}  // namespace telegrad
