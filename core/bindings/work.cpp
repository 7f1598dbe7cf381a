#include "bindings/work.hpp"

#include <pthread.h>
#include <structmember.h>
#include <unistd.h>

#include <cstddef>

#include "bindings/fast_path.hpp"
#include "bindings/names.hpp"
#include "bindings/operation.hpp"
#include "bindings/python_type.hpp"

namespace telegrad::bindings {
namespace {

PyTypeObject* state_type = nullptr;
PyTypeObject* operation_type = nullptr;
PyObject* keep_name = nullptr;
int this_process = 0;

WorkState* state_of(PyObject* object) { return reinterpret_cast<WorkState*>(object); }

// Null where it is something else.
StartedCall* operation_in(const WorkState& state) {
  if (state.request == nullptr || Py_TYPE(state.request) != operation_type) return nullptr;
  return nb::inst_ptr<StartedCall>(nb::handle(state.request));
}

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
  if (type == state_type) {
    PyErr_SetString(PyExc_TypeError, "WorkState is the base of telegrad.communicator.work.Work: make a Work");
    return nullptr;
  }
  PyObject* const self = allocated(type);
  if (self != nullptr) state_of(self)->process = this_process;
  return self;
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  const WorkState& state = *state_of(object);
  Py_VISIT(Py_TYPE(object));
  for (PyObject* const one : {state.request, state.operation, state.held, state.finish, state.member}) Py_VISIT(one);
  return 0;
}

int clear(PyObject* object) {
  WorkState& state = *state_of(object);
  Py_CLEAR(state.request);
  Py_CLEAR(state.operation);
  Py_CLEAR(state.held);
  Py_CLEAR(state.finish);
  Py_CLEAR(state.member);
  return 0;
}

// All are of classes written in Python, whose deallocation has called hand_over(): the stable ABI has no call for that.
void free_it(PyObject* object) {
  PyObject_GC_UnTrack(object);
  clear(object);
  free_memory(object);
}

// In a forked child the network is another process's, and locks may be held for ever.
void hand_over(PyObject* object) {
  const WorkState& state = *state_of(object);
  if (state.member == nullptr || state.member == Py_None || state.process != this_process) return;
  const StartedCall* const operation = operation_in(state);
  if (operation != nullptr && operation->succeeded()) return;
  PyObject* kind = nullptr;
  PyObject* error = nullptr;
  PyObject* trace = nullptr;
  PyErr_Fetch(&kind, &error, &trace);
  const auto kept = nb::steal(PyObject_CallMethodObjArgs(state.member, keep_name, state.request, state.held, nullptr));
  if (!kept.is_valid()) PyErr_WriteUnraisable(object);
  PyErr_Restore(kind, error, trace);
}

}  // namespace

nb::object new_work() {
  static auto* const type = reinterpret_cast<PyTypeObject*>(
      nb::object(nb::module_::import_("telegrad.communicator.work").attr("Work")).release().ptr());
  nb::object work = nb::steal(make(type, nullptr, nullptr));
  if (!work.is_valid()) throw nb::python_error();
  return work;
}

nb::object wait_shortly(PyObject* const* given, std::size_t count, PyObject* names) {
  if (count != 1 || names != nullptr || PyObject_TypeCheck(given[0], state_type) == 0) return {};
  WorkState& state = *state_of(given[0]);
  const StartedCall* const operation = operation_in(state);
  if (operation == nullptr || state.process != this_process) return {};
  const auto kept = nb::borrow(state.request);
  if (!operation->succeeds_soon()) return {};
  if (state.finish != nullptr && state.finish != Py_None) Py_CLEAR(state.held);  // the result is another one's
  return nb::borrow(Py_True);
}

void bind_work(nb::module_& module) {
  static PyMemberDef members[] = {
      {"_request", T_OBJECT_EX, offsetof(WorkState, request), 0, nullptr},
      {"_operation", T_OBJECT_EX, offsetof(WorkState, operation), 0, nullptr},
      {"_held", T_OBJECT, offsetof(WorkState, held), 0, nullptr},
      {"_finish", T_OBJECT, offsetof(WorkState, finish), 0, nullptr},
      {"_member", T_OBJECT, offsetof(WorkState, member), 0, nullptr},
      {"_rank", T_INT, offsetof(WorkState, rank), 0, nullptr},
      {"_process", T_INT, offsetof(WorkState, process), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyType_Slot slots[] = {slot(Py_tp_new, make),
                                slot(Py_tp_dealloc, free_it),
                                slot(Py_tp_finalize, hand_over),
                                slot(Py_tp_traverse, traverse),
                                slot(Py_tp_clear, clear),
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec{.name = "telegrad._core.WorkState",
                          .basicsize = sizeof(WorkState),
                          .itemsize = 0,
                          .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
                          .slots = slots};
  keep_name = interned("_keep");
  operation_type = reinterpret_cast<PyTypeObject*>(nb::type<StartedCall>().inc_ref().ptr());
  this_process = ::getpid();
  ::pthread_atfork(nullptr, nullptr, [] { this_process = ::getpid(); });
  const nb::object type = made(&spec);
  state_type = reinterpret_cast<PyTypeObject*>(nb::borrow(type).release().ptr());
  module.attr("WorkState") = type;
}

}  // namespace telegrad::bindings
