#pragma once
// Types of Python that nanobind does not make: where its calls would cost more than what they do.

#include "bindings/binding.hpp"

namespace telegrad::bindings {

template <class Function>
PyType_Slot slot(int number, Function* function) {
  return {number, reinterpret_cast<void*>(function)};
}

/// Throws nb::python_error.
inline nb::object made(PyType_Spec* spec) {
  nb::object type = nb::steal(PyType_FromSpec(spec));
  if (!type.is_valid()) throw nb::python_error();
  return type;
}

}  // namespace telegrad::bindings
