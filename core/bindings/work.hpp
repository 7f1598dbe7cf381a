#pragma once
// WorkState: what a Work of Python is made of. While the network may touch its tensors, it keeps them; if it goes before
// the operation is over, its communicator does.

#include "bindings/binding.hpp"

namespace telegrad::bindings {

struct WorkState {
  PyObject_HEAD
  PyObject* request;
  PyObject* operation;  // its name
  PyObject* held;       // its tensors, and where `finish` is None its result
  PyObject* finish;     // makes the result of the request
  PyObject* member;     // the communicator; None where tensors need not be kept
  int rank;
  int process;  // that made it: its id
};

/// A telegrad.communicator.work.Work with nothing in it but its process. Throws nb::python_error.
nb::object new_work();

}  // namespace telegrad::bindings
