#pragma once
// Communicators of programs that have MPI. Link telegrad::mpi.

#include <mpi.h>

#include "telegrad/telegrad.hpp"

namespace telegrad::mpi {

/// Joins the ranks of `comm`, an intracommunicator, which all call this with the same options; messages travel on a
/// duplicate of it. MPI must have been initialised with MPI_THREAD_MULTIPLE; close the Communicator before MPI_Finalize.
/// Throws std::invalid_argument, and TransportError, also where not all ranks have come within `join_timeout_s`: then
/// `comm` cannot be joined again, but a duplicate of it.
api::Communicator join(MPI_Comm comm, const api::Options& options = {}, double join_timeout_s = 300.0);

}  // namespace telegrad::mpi
