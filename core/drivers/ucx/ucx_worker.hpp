#pragma once
// One of UCX's workers: made, reached at an address, and taken forward. It must not know of drivers and their messages.

#include <ucp/api/ucp.h>

#include <cstddef>
#include <string>
#include <vector>

#include "base/types.hpp"

namespace telegrad {

/// Throws TransportError with what UCX said to `call`, unless `status` is good.
void check_ucx(ucs_status_t status, Rank rank, const std::string& call);

/// Makes `worker`, which gives messages of kind `id` to `callback(argument, …)`. Returns the descriptor that becomes readable
/// when the worker is armed and has something to do. Throws TransportError; what is in `worker` then is to be destroyed.
int open_worker(ucp_context_h context, Rank rank, ucp_worker_h& worker, unsigned id, ucp_am_recv_callback_t callback,
                void* argument);

/// Appends the address at which peers reach `worker`, with its length in front. Throws TransportError.
void append_address(ucp_worker_h worker, Rank rank, std::vector<std::byte>& bytes);

void append_prefixed(ConstBytes part, std::vector<std::byte>& bytes);

/// Takes what append_prefixed() wrote off the front of `bytes`; empty where it is damaged.
ConstBytes take_prefixed(ConstBytes& bytes);

/// Looks for what has happened, a limited number of times; returns how much has.
unsigned progressed(ucp_worker_h worker);

}  // namespace telegrad
