// Communicators that C++ programs split from others, among the three ranks that mpiexec starts of this program
// (core/CMakeLists.txt).
#include <mpi.h>

#include "public_split_checks.hpp"
#include "telegrad/mpi.hpp"
#include "testing.hpp"

namespace {

struct MpiProgram {
  MpiProgram() {
    int level = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  }
  ~MpiProgram() { MPI_Finalize(); }
};
const MpiProgram program;

}  // namespace

TEST("groups over MPI are those of naive counting, and sum among themselves") {
  auto comm = telegrad::mpi::join(MPI_COMM_WORLD, {.timeout_s = 60.0});
  telegrad_checks::check_groups(comm);
}

TEST("what ends a group over MPI leaves the communicator that it came from") {
  auto comm = telegrad::mpi::join(MPI_COMM_WORLD, {.timeout_s = 60.0});
  telegrad_checks::check_failures(comm);
}
