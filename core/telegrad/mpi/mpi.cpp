// The library's own headers first: once telegrad.hpp is read, its names stand beside theirs.
#include "joining/mpi.hpp"
#include "telegrad/joined.hpp"

#include "telegrad/mpi.hpp"

namespace telegrad::mpi {

api::Communicator join(MPI_Comm comm, const api::Options& options) {
  api::detail::check(options);
  return api::detail::translated([&] {
    auto joined = std::make_shared<api::detail::Joined>();
    joined->core = join(comm, api::detail::own_options(options));
    return api::Communicator(std::move(joined));
  });
}

}  // namespace telegrad::mpi
