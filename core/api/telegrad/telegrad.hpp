#pragma once
// What a C++ program includes: telegrad::Communicator, SparseVector, Work and the errors, the nouns of the Python package.
// The library's own sources include the parts, since their telegrad::Communicator is another.

#include "telegrad/communicator.hpp"
#include "telegrad/errors.hpp"
#include "telegrad/sparse_vector.hpp"
#include "telegrad/work.hpp"

namespace telegrad {
using namespace api;
}
