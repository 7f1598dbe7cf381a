#pragma once
// Types of Python that nanobind does not make: where its calls would cost more than what they do. All of Python's stable ABI,
// in which types are opaque: tp_alloc and tp_free of these types, and of Python's classes derived from them, are the two below.

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

/// Null, with an error set, where there is no memory.
inline PyObject* allocated(PyTypeObject* type) { return PyType_GenericAlloc(type, 0); }
/// The memory of an object of a type with Py_TPFLAGS_HAVE_GC, and its reference to that type.
inline void free_memory(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  PyObject_GC_Del(object);
  Py_DECREF(type);
}

/// self.name(); null, with an error set, where that raises.
inline PyObject* call_method(PyObject* self, PyObject* name) {
  return PyObject_VectorcallMethod(name, &self, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

}  // namespace telegrad::bindings
