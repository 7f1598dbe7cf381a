#pragma once
// From an MPI communicator to a Communicator of its ranks: what telegrad/mpi.hpp offers to C++ programs.

#include <memory>

#include "drivers/mpi/mpi_network.hpp"
#include "progress/communicator.hpp"

namespace telegrad::mpi {

/// A Communicator of the ranks of `comm`, an intracommunicator; all of them call it. MPI must have been initialised with
/// MPI_THREAD_MULTIPLE. Messages travel on a duplicate of `comm`. Close it before MPI_Finalize. The epoch in `options` is
/// not used. Throws TransportError, also where not all ranks have come within `join_timeout_s`, and std::invalid_argument
/// for another kind of communicator.
std::shared_ptr<Communicator> join(MPI_Comm comm, CommunicatorOptions options = {}, double join_timeout_s = 300.0);

}  // namespace telegrad::mpi
