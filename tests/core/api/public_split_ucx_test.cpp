// Communicators that C++ programs split from others, over UCX.
#include <barrier>
#include <cstddef>
#include <thread>
#include <vector>

#include "public_split_checks.hpp"
#include "telegrad/ucx.hpp"
#include "testing.hpp"

using telegrad::Communicator;
using telegrad::Rank;

namespace {

void over_ucx(Rank size, void (*check)(Communicator&)) {
  std::barrier meet(static_cast<std::ptrdiff_t>(size));
  std::vector<std::vector<std::byte>> blobs(size);
  std::vector<std::jthread> threads;
  for (Rank rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        auto comm = telegrad::ucx::join(
            rank, size,
            [&](const std::vector<std::byte>& mine) {
              blobs[rank] = mine;
              meet.arrive_and_wait();
              return blobs;
            },
            {.timeout_s = 60.0});
        check(comm);
      } catch (const std::exception& error) {
        testing::fail(__FILE__, __LINE__, error.what());
      }
    });
  }
}

}  // namespace

TEST("groups over UCX are those of naive counting, and sum among themselves") {
  for (const Rank size : {1U, 2U, 3U, 5U}) over_ucx(size, telegrad_checks::check_groups);
}

TEST("what ends a group over UCX leaves the communicator that it came from") {
  over_ucx(3, telegrad_checks::check_failures);
}
