#pragma once
// From a message between two ranks to the Request that sends or receives it. It must not know what runs Requests.
// Arguments have been checked by whoever offers this to users: the other rank is another one, and the tag below
// kTagsMost. The caller's memory must stay as it is until the request is done; after a failure until the communicator is
// closed.

#include "base/types.hpp"
#include "session/request.hpp"

namespace telegrad {

inline constexpr Step kTagsMost = Step{1} << 31;

/// Done once `data` may change, which may be before it is received.
RequestPtr make_send(DType dtype, ConstBytes data, Rank to, Step tag);
/// Messages of one source and tag are received in the order in which they were sent. Both sides must agree on dtype and
/// length. `source`: kNoRank takes the message of this tag that came first, whoever sent it; Request::source() tells.
RequestPtr make_receive(DType dtype, Bytes into, Rank source, Step tag);

}  // namespace telegrad
