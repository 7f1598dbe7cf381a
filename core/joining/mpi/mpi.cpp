#include "joining/mpi.hpp"

#include <utility>

#include "drivers/mpi/mpi_driver.hpp"
#include "joining/join.hpp"

namespace telegrad::mpi {

std::shared_ptr<Communicator> join(MPI_Comm comm, CommunicatorOptions options, double join_timeout_s) {
  const auto patience = MpiNetwork::patience(join_timeout_s);
  const auto network = MpiNetwork::of(comm, patience);
  return telegrad::join(std::make_unique<MpiDriver>(network, network->rank(), network->size()), std::move(options),
                        [&](ConstBytes mine) { return network->exchange(mine, patience); });
}

}  // namespace telegrad::mpi
