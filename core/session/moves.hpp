#pragma once
// From a call that moves data, or only waits, to the Request that runs it. It must not know what runs Requests.
// Arguments have been checked by whoever offers this to users. `size`: the number of ranks. The caller's memory must stay
// as it is until the request is done; after a failure until the communicator is closed.

#include "base/types.hpp"
#include "session/request.hpp"

namespace telegrad {

RequestPtr make_all_gather(Rank size, DType dtype, ConstBytes mine, Bytes all);
RequestPtr make_broadcast(Rank size, DType dtype, Bytes data, Rank root);
RequestPtr make_barrier();

}  // namespace telegrad
