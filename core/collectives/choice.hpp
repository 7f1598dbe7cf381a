#pragma once
// Which algorithm, if the caller names none. The answer depends only on what all ranks know alike.

#include <cstddef>

#include "base/types.hpp"
#include "transport/envelope.hpp"

namespace telegrad {

/// For a dense vector of `bytes` bytes among `size` ranks.
Algorithm choose_allreduce(Rank size, std::size_t bytes);

}  // namespace telegrad
