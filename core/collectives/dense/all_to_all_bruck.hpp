#pragma once

#include "transport/transport.hpp"

namespace telegrad {

/// all_to_all() for short blocks: ceil(log2 P) messages of about half of all blocks, and scratch of twice the output.
Task<void> all_to_all_bruck(Transport& net, ConstBytes input, Bytes output);

}  // namespace telegrad
