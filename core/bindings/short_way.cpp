// ShortAllReduce(method): Communicator.all_reduce as it is called most, which is most of what a small sum costs where it
// is called as a Python function. `all_reduce(x)`, `(x, op)`, `(x, op=…, algorithm=…)` of an array or a tensor that can be
// summed as it is go straight to the engine; every other call is the method's, which knows all arguments and all errors.
#include <nanobind/stl/shared_ptr.h>
#include <structmember.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "bindings/binding.hpp"
#include "bindings/dense_array.hpp"
#include "bindings/names.hpp"
#include "bindings/operation.hpp"
#include "progress/communicator.hpp"

namespace telegrad::bindings {
namespace {

struct ShortAllReduce {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* method;
  PyObject* dictionary;
  PyObject* weak_references;
};

PyTypeObject* communicator_type = nullptr;
PyObject* live_name = nullptr;
PyObject* block_name = nullptr;
PyObject* abandoned_name = nullptr;
PyObject* op_name = nullptr;
PyObject* algorithm_name = nullptr;

struct Arguments {
  nb::handle self;
  nb::handle x;
  nb::handle op;         // null: not given
  nb::handle algorithm;  // null: not given
};

// Names of arguments are interned wherever a call is written down; others are the method's to understand.
std::optional<Arguments> arguments_of(PyObject* const* given, std::size_t count, PyObject* names) {
  if (count < 2 || count > 3) return std::nullopt;
  Arguments arguments{given[0], given[1], count == 3 ? given[2] : nullptr, {}};
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(names, i);
    nb::handle* const place = name == op_name          ? &arguments.op
                              : name == algorithm_name ? &arguments.algorithm
                                                       : nullptr;
    if (place == nullptr || place->is_valid()) return std::nullopt;
    *place = given[count + static_cast<std::size_t>(i)];
  }
  return arguments;
}

// None once the sum is there; null: this call is the method's.
nb::object summed(const Arguments& arguments) {
  const auto held = nb::steal(PyObject_GetAttr(arguments.self.ptr(), live_name));
  if (!held.is_valid()) throw nb::python_error();
  if (Py_TYPE(held.ptr()) != communicator_type) return {};
  auto& communicator = *nb::inst_ptr<Communicator>(held);
  RequestPtr request = request_for_array(communicator, arguments.x, arguments.op, arguments.algorithm);
  if (request == nullptr) return {};
  if (is_done(communicator, request)) return nb::none();
  // It takes long, or has failed: errors are known where the method's are. A signal may end the wait before a line of
  // Python has run, and the network still uses what is summed: so it is kept here.
  const auto abandoned = nb::steal(PyObject_GetAttr(arguments.self.ptr(), abandoned_name));
  if (!abandoned.is_valid()) throw nb::python_error();
  const nb::object begun = nb::cast(operation_of(nb::cast<std::shared_ptr<Communicator>>(held), std::move(request)));
  const nb::object kept = nb::make_tuple(begun, arguments.x);
  auto result =
      nb::steal(PyObject_CallMethodObjArgs(arguments.self.ptr(), block_name, begun.ptr(), arguments.x.ptr(), nullptr));
  if (result.is_valid()) return result;
  nb::python_error error;
  const nb::object known = nb::module_::import_("telegrad.errors").attr("TransportError");
  if (!error.matches(known) && PyList_Append(abandoned.ptr(), kept.ptr()) != 0) throw nb::python_error();
  throw error;
}

PyObject* call(PyObject* callable, PyObject* const* given, std::size_t flags, PyObject* names) {
  const auto count = static_cast<std::size_t>(PyVectorcall_NARGS(flags));
  try {
    if (const auto arguments = arguments_of(given, count, names)) {
      if (nb::object result = summed(*arguments); result.is_valid()) return result.release().ptr();
    }
  } catch (nb::python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  return PyObject_Vectorcall(reinterpret_cast<ShortAllReduce*>(callable)->method, given, flags, names);
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* names) {
  static const char* const known[] = {"method", nullptr};
  PyObject* method = nullptr;
  if (PyArg_ParseTupleAndKeywords(arguments, names, "O", const_cast<char**>(known), &method) == 0) return nullptr;
  if (PyCallable_Check(method) == 0) {
    PyErr_SetString(PyExc_TypeError, "method must be callable");
    return nullptr;
  }
  auto* const self = reinterpret_cast<ShortAllReduce*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = &call;
  self->method = Py_NewRef(method);
  return reinterpret_cast<PyObject*>(self);
}

PyObject* bind(PyObject* self, PyObject* object, PyObject*) {
  return object == nullptr ? Py_NewRef(self) : PyMethod_New(self, object);
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  const auto* const self = reinterpret_cast<ShortAllReduce*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->method);
  Py_VISIT(self->dictionary);
  return 0;
}

int clear(PyObject* object) {
  auto* const self = reinterpret_cast<ShortAllReduce*>(object);
  Py_CLEAR(self->method);
  Py_CLEAR(self->dictionary);
  return 0;
}

void free_it(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  PyObject_ClearWeakRefs(object);
  clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* text(PyObject* object) {
  return PyUnicode_FromFormat("<short way of %R>", reinterpret_cast<ShortAllReduce*>(object)->method);
}

// Where the module has it, as functions are pickled.
PyObject* reduce(PyObject* object, PyObject*) { return PyObject_GetAttrString(object, "__qualname__"); }

template <class Function>
PyType_Slot slot(int number, Function* function) {
  return {number, reinterpret_cast<void*>(function)};
}

}  // namespace

void bind_short_way(nb::module_& module) {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(ShortAllReduce, vectorcall), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(ShortAllReduce, dictionary), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(ShortAllReduce, weak_references), READONLY, nullptr},
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
      .name = "telegrad._core.ShortAllReduce",
      .basicsize = sizeof(ShortAllReduce),
      .itemsize = 0,
      .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
      .slots = slots};
  live_name = interned("_live");
  abandoned_name = interned("_abandoned");
  block_name = interned("_block");
  op_name = interned("op");
  algorithm_name = interned("algorithm");
  communicator_type = reinterpret_cast<PyTypeObject*>(nb::type<Communicator>().inc_ref().ptr());
  const auto type = nb::steal(PyType_FromSpec(&spec));
  if (!type.is_valid()) throw nb::python_error();
  module.attr("ShortAllReduce") = type;
}

}  // namespace telegrad::bindings
