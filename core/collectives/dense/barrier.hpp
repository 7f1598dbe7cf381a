#pragma once

#include "transport/transport.hpp"

namespace telegrad {

/// Returns once every rank has called it. ceil(log2 P) messages without payload per rank.
/// Uses steps [first_step, first_step + 32).
Task<void> barrier(Transport& net, Step first_step = 0);

}  // namespace telegrad
