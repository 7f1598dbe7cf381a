// FastPath(method): a method as Python has it, of the same name as one of the core's fast paths, which is asked first.
#include "bindings/fast_path.hpp"

#include <structmember.h>

#include <array>
#include <exception>
#include <new>
#include <string_view>
#include <utility>

#include "bindings/python_type.hpp"

namespace telegrad::bindings {
namespace {

struct FastPathObject {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  FastPath path;
  PyObject* method;
  PyObject* dictionary;
  PyObject* weak_references;
};

constexpr std::array kPaths{std::pair{std::string_view("all_reduce"), &all_reduce_shortly},
                           std::pair{std::string_view("wait"), &wait_shortly}};

PyObject* method_type = nullptr;  // types.MethodType

PyObject* call(PyObject* callable, PyObject* const* given, std::size_t flags, PyObject* names) {
  auto* const self = reinterpret_cast<FastPathObject*>(callable);
  try {
    nb::object result = self->path(given, static_cast<std::size_t>(PyVectorcall_NARGS(flags)), names);
    if (result.is_valid()) return result.release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  return PyObject_Vectorcall(self->method, given, flags, names);
}

// Null, with an error set, where there is no path of the method's name.
FastPath path_of(PyObject* method) {
  const auto name = nb::steal(PyObject_GetAttrString(method, "__name__"));
  if (!name.is_valid()) return nullptr;
  for (const auto& [known, path] : kPaths) {
    if (PyUnicode_Check(name.ptr()) != 0 && PyUnicode_CompareWithASCIIString(name.ptr(), known.data()) == 0) return path;
  }
  PyErr_Format(PyExc_ValueError, "there is no fast path of %R: all_reduce and wait have one", method);
  return nullptr;
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* names) {
  static const char* const known[] = {"method", nullptr};
  PyObject* method = nullptr;
  if (PyArg_ParseTupleAndKeywords(arguments, names, "O", const_cast<char**>(known), &method) == 0) return nullptr;
  if (PyCallable_Check(method) == 0) {
    PyErr_SetString(PyExc_TypeError, "method must be callable");
    return nullptr;
  }
  const FastPath path = path_of(method);
  if (path == nullptr) return nullptr;
  auto* const self = reinterpret_cast<FastPathObject*>(allocated(type));
  if (self == nullptr) return nullptr;
  self->vectorcall = &call;
  self->path = path;
  self->method = Py_NewRef(method);
  return reinterpret_cast<PyObject*>(self);
}

PyObject* bind(PyObject* self, PyObject* object, PyObject*) {
  return object == nullptr ? Py_NewRef(self) : PyObject_CallFunctionObjArgs(method_type, self, object, nullptr);
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  const auto* const self = reinterpret_cast<FastPathObject*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->method);
  Py_VISIT(self->dictionary);
  return 0;
}

int clear(PyObject* object) {
  auto* const self = reinterpret_cast<FastPathObject*>(object);
  Py_CLEAR(self->method);
  Py_CLEAR(self->dictionary);
  return 0;
}

void free_it(PyObject* object) {
  PyObject_GC_UnTrack(object);
  PyObject_ClearWeakRefs(object);
  clear(object);
  free_memory(object);
}

PyObject* text(PyObject* object) {
  return PyUnicode_FromFormat("<fast path of %R>", reinterpret_cast<FastPathObject*>(object)->method);
}

// Where the module has it, as functions are pickled.
PyObject* reduce(PyObject* object, PyObject*) { return PyObject_GetAttrString(object, "__qualname__"); }

}  // namespace

void bind_fast_path(nb::module_& module) {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastPathObject, vectorcall), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(FastPathObject, dictionary), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(FastPathObject, weak_references), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyMethodDef methods[] = {{"__reduce__", &reduce, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef properties[] = {
      {"__dict__", &PyObject_GenericGetDict, &PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyType_Slot slots[] = {slot(Py_tp_new, make),         slot(Py_tp_dealloc, free_it),
                                slot(Py_tp_traverse, traverse), slot(Py_tp_clear, clear),
                                slot(Py_tp_descr_get, bind),    slot(Py_tp_call, PyVectorcall_Call),
                                {Py_tp_members, members},       {Py_tp_getset, properties},
                                {Py_tp_methods, methods},       slot(Py_tp_repr, text),
                                {0, nullptr}};
  static PyType_Spec spec{
      .name = "telegrad._core.FastPath",
      .basicsize = sizeof(FastPathObject),
      .itemsize = 0,
      .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
      .slots = slots};
  method_type = nb::object(nb::module_::import_("types").attr("MethodType")).release().ptr();
  module.attr("FastPath") = made(&spec);
}

}  // namespace telegrad::bindings
