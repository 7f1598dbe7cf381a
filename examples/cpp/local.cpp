// Sums sparse vectors among threads of one process, each a rank: build/local [ranks].
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <telegrad/telegrad.hpp>

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 4;
  if (size < 1) {
    std::fprintf(stderr, "ranks=%s must be a number of at least 1\n", argv[1]);
    return 2;
  }
  auto ranks = telegrad::Communicator::local(static_cast<telegrad::Rank>(size));
  std::vector<std::jthread> threads;
  for (telegrad::Communicator& comm : ranks) {
    threads.emplace_back([&comm] {
      // Every rank has an entry of its own and shares one with all others.
      const telegrad::SparseVector<float> mine(1'000'000, {7, 1000 + comm.rank()}, {1.0F, 0.5F});
      const auto sum = comm.all_reduce(mine).result();
      if (comm.rank() != 0) return;
      for (std::size_t i = 0; i < sum.nnz(); ++i) std::printf("%u: %g\n", sum.indices()[i], sum.values()[i]);
    });
  }
}
