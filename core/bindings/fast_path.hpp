#pragma once
// Methods of Python that cost more than what they do: the core takes their plainest calls itself.

#include <cstddef>

#include "bindings/binding.hpp"

namespace telegrad::bindings {

/// What a call gives, or null where it is the method's, which knows all arguments and all errors. `given`: the object and
/// `count` − 1 arguments in order, then those of `names` (a tuple, or null). Throws nb::python_error.
using FastPath = nb::object (*)(PyObject* const* given, std::size_t count, PyObject* names);

/// Communicator.all_reduce(x, op, algorithm=…, async_op=…) of an array or a tensor that can be summed as it is.
nb::object all_reduce_shortly(PyObject* const* given, std::size_t count, PyObject* names);
/// Work.wait() of an operation that is over, or soon will be.
nb::object wait_shortly(PyObject* const* given, std::size_t count, PyObject* names);

}  // namespace telegrad::bindings
