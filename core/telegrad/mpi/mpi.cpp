// The library's own headers first: once telegrad.hpp is read, its names stand beside theirs.
#include "joining/mpi.hpp"
#include "telegrad/joined.hpp"

#include <stdexcept>
#include <string>

#include "telegrad/mpi.hpp"

namespace telegrad::mpi {

api::Communicator join(MPI_Comm comm, const api::Options& options, double join_timeout_s) {
  api::detail::check(options);
  if (!(join_timeout_s > 0.0)) {
    throw std::invalid_argument("join_timeout_s=" + std::to_string(join_timeout_s) + " must be above 0 seconds");
  }
  return api::detail::translated([&] {
    auto joined = std::make_shared<api::detail::Joined>();
    joined->core = join(comm, api::detail::own_options(options), join_timeout_s);
    return api::Communicator(std::move(joined));
  });
}

}  // namespace telegrad::mpi
