#include "joining/mpi.hpp"

#include <utility>

#include "drivers/mpi/mpi_driver.hpp"
#include "joining/join.hpp"

namespace telegrad::mpi {

std::shared_ptr<Communicator> join(MPI_Comm comm, CommunicatorOptions options) {
  const auto network = MpiNetwork::of(comm);
  return telegrad::join(std::make_unique<MpiDriver>(network, network->rank(), network->size()), std::move(options),
                        [&](ConstBytes mine) { return network->exchange(mine); });
}

}  // namespace telegrad::mpi
