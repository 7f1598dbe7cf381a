#pragma once
// Communicators among processes, over UCX: shared memory, TCP or RDMA. Link telegrad::ucx.

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "telegrad/telegrad.hpp"

namespace telegrad::ucx {

/// Takes this rank's bytes and returns every rank's, by rank: an allgather of whatever starts the processes.
using Exchange = std::function<std::vector<std::vector<std::byte>>(const std::vector<std::byte>& mine)>;

/// Joins `size` ranks, which all call this with the same options. `interface`: of the network, such as "eth0"; empty:
/// UCX chooses. Throws std::invalid_argument, TransportError, and what `exchange` throws.
api::Communicator join(Rank rank, Rank size, const Exchange& exchange, const api::Options& options = {},
                       const std::string& interface = {});

}  // namespace telegrad::ucx
