// The library's own headers first: once telegrad.hpp is read, its names stand beside theirs.
#include "api/joined.hpp"
#include "drivers/mpi/mpi_driver.hpp"
#include "joining/join.hpp"
#include "joining/mpi.hpp"

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "telegrad/mpi.hpp"

namespace telegrad::mpi {

api::Communicator join(MPI_Comm comm, const api::Options& options, double join_timeout_s) {
  api::detail::check(options);
  if (!(join_timeout_s > 0.0)) {
    throw std::invalid_argument("join_timeout_s=" + std::to_string(join_timeout_s) + " must be above 0 seconds");
  }
  return api::detail::translated([&] {
    auto joined = std::make_shared<api::detail::Joined>();
    joined->options = options;
    joined->core = join(comm, api::detail::own_options(options), join_timeout_s);
    // The same as join() has made: there is one for each MPI communicator.
    joined->connect = [network = MpiNetwork::of(comm, MpiNetwork::patience(join_timeout_s))](
                          Rank rank, Rank size, CommunicatorOptions own, const telegrad::Exchange& exchange) {
      return telegrad::join(std::make_unique<MpiDriver>(network, rank, size), std::move(own), exchange);
    };
    return api::Communicator(std::move(joined));
  });
}

}  // namespace telegrad::mpi
