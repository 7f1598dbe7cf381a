// Sums sparse vectors of all ranks of an MPI job: mpiexec -n 4 build/examples/sum_over_mpi
#include <cstdio>
#include <exception>

#include <mpi.h>
#include <telegrad/mpi.hpp>

namespace {

void sum_sparse_vectors() {
  auto comm = telegrad::mpi::join(MPI_COMM_WORLD);
  // Every rank has an entry of its own and shares one with all others.
  const telegrad::SparseVector<float> mine(1'000'000, {7, 1000 + comm.rank()}, {1.0F, 0.5F});
  const auto sum = comm.all_reduce(mine).result();
  if (comm.rank() != 0) return;
  for (std::size_t i = 0; i < sum.nnz(); ++i) std::printf("%u: %g\n", sum.indices()[i], sum.values()[i]);
}

}  // namespace

int main(int argc, char** argv) {
  int threads = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &threads);
  try {
    sum_sparse_vectors();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
