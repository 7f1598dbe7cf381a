#pragma once
// From nothing to a Communicator over UCX: what both Python and C++ programs call.

#include <memory>

#include "drivers/ucx/ucx_options.hpp"
#include "joining/join.hpp"

namespace telegrad::ucx {

/// As telegrad::join(), with the key of the environment. What UCX says in joining comes with its likely causes and the remedy.
std::shared_ptr<Communicator> join(Rank rank, Rank size, const UcxOptions& ucx, CommunicatorOptions options,
                                   const Exchange& exchange, const Waiting& waiting = wait_until);

}  // namespace telegrad::ucx
