// all_reduce as it is called most, which is most of what a small sum costs where it is called as a Python function.
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <optional>
#include <utility>

#include "bindings/dense_array.hpp"
#include "bindings/device_fast_path.hpp"
#include "bindings/fast_path.hpp"
#include "bindings/names.hpp"
#include "bindings/operation.hpp"
#include "bindings/python_type.hpp"
#include "bindings/work.hpp"
#include "progress/communicator.hpp"

namespace telegrad::bindings {
namespace {

struct Spelling {
  PyObject* live = interned("_live");
  PyObject* over = interned("_over");
  PyObject* kept = interned("_kept");
  PyObject* let_go = interned("_let_go");
  PyObject* block = interned("_block");
  PyObject* abandoned = interned("_abandoned");
  PyObject* device_fast_path = interned("_device_fast_path");
  PyObject* sum = interned("sum");
  PyObject* begin_shortly = interned("_begin_shortly");
  PyObject* all_reduce = interned("all_reduce");
  PyObject* op = interned("op");
  PyObject* algorithm = interned("algorithm");
  PyObject* async_op = interned("async_op");
};

const Spelling& known() {
  static const Spelling names;
  return names;
}

struct Arguments {
  nb::handle self;
  nb::handle x;
  nb::handle op;         // null: not given
  nb::handle algorithm;  // null: not given
  nb::handle async_op;   // null: not given
};

// Names of arguments are interned wherever a call is written down; others are the method's to understand.
std::optional<Arguments> arguments_of(PyObject* const* given, std::size_t count, PyObject* names) {
  if (count < 2 || count > 3) return std::nullopt;
  Arguments arguments{given[0], given[1], count == 3 ? given[2] : nullptr, {}, {}};
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_Size(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const name = PyTuple_GetItem(names, i);
    nb::handle* const place = name == known().op          ? &arguments.op
                              : name == known().algorithm ? &arguments.algorithm
                              : name == known().async_op  ? &arguments.async_op
                                                          : nullptr;
    if (place == nullptr || place->is_valid()) return std::nullopt;
    *place = given[count + static_cast<std::size_t>(i)];
  }
  return arguments;
}

nb::object attribute(nb::handle self, PyObject* name) {
  nb::object found = nb::steal(PyObject_GetAttr(self.ptr(), name));
  if (!found.is_valid()) throw nb::python_error();
  return found;
}

// None once the sum is there.
nb::object waited_for(const Arguments& arguments, Communicator& communicator, nb::handle held, RequestPtr request) {
  if (is_done(communicator, request)) return nb::none();
  // It takes long, or has failed: errors are known where the method's are. A signal may end the wait before a line of
  // Python has run, and the network still uses what is summed: so it is kept here.
  const nb::object abandoned = attribute(arguments.self, known().abandoned);
  const nb::object begun = nb::cast(operation_of(nb::cast<std::shared_ptr<Communicator>>(held), std::move(request)));
  const nb::object kept = nb::make_tuple(begun, arguments.x);
  auto result = nb::steal(
      PyObject_CallMethodObjArgs(arguments.self.ptr(), known().block, begun.ptr(), arguments.x.ptr(), nullptr));
  if (result.is_valid()) return result;
  nb::python_error error;
  const nb::object expected = nb::module_::import_("telegrad.errors").attr("TransportError");
  if (!error.matches(expected) && PyList_Append(abandoned.ptr(), kept.ptr()) != 0) throw nb::python_error();
  throw error;
}

// Null where no device has a fast path by now, or not for such a call.
nb::object on_device(const Arguments& arguments, nb::handle held, bool waits) {
  static auto* const type = reinterpret_cast<PyTypeObject*>(nb::type<DeviceFastPath>().inc_ref().ptr());
  const nb::object path = attribute(arguments.self, known().device_fast_path);
  if (Py_TYPE(path.ptr()) != type) return {};
  auto& found = *nb::inst_ptr<DeviceFastPath>(path);
  if (waits) {
    const auto communicator = nb::cast<std::shared_ptr<Communicator>>(held);
    const bool is_there = found.all_reduce(arguments.self, communicator, arguments.x, arguments.op, false) != nullptr;
    return is_there ? nb::none() : nb::object();
  }
  if (!found.has_streams()) return {};
  // What stands for it is made of what Python knows of streams.
  auto work = nb::steal(PyObject_CallMethodObjArgs(arguments.self.ptr(), known().begin_shortly, arguments.x.ptr(),
                                                   arguments.op.is_valid() ? arguments.op.ptr() : known().sum, nullptr));
  if (!work.is_valid()) throw nb::python_error();
  return work.is_none() ? nb::object() : work;
}

// A Work, which is whole before anything begins.
nb::object begun(const Arguments& arguments, Communicator& communicator, nb::handle held, const RequestPtr& request) {
  if (PyObject_Size(attribute(arguments.self, known().kept).ptr()) != 0) {
    const auto let_go = nb::steal(call_method(arguments.self.ptr(), known().let_go));
    if (!let_go.is_valid()) throw nb::python_error();
  }
  const nb::object over = attribute(arguments.self, known().over);  // what is called now never reaches the network
  nb::object work = new_work();
  WorkState& state = *reinterpret_cast<WorkState*>(work.ptr());
  state.request = nb::cast(operation_of(nb::cast<std::shared_ptr<Communicator>>(held), request)).release().ptr();
  state.operation = Py_NewRef(known().all_reduce);
  state.held = nb::borrow(arguments.x).release().ptr();
  state.rank = static_cast<int>(communicator.rank());
  communicator.submit(request, false);
  if (over.ptr() == Py_False) state.member = nb::borrow(arguments.self).release().ptr();
  return work;
}

}  // namespace

nb::object all_reduce_shortly(PyObject* const* given, std::size_t count, PyObject* names) {
  static auto* const communicator_type =
      reinterpret_cast<PyTypeObject*>(nb::type<Communicator>().inc_ref().ptr());
  const auto arguments = arguments_of(given, count, names);
  if (!arguments) return {};
  const bool waits = !arguments->async_op.is_valid() || arguments->async_op.ptr() == Py_False;
  if (!waits && arguments->async_op.ptr() != Py_True) return {};
  const nb::object held = attribute(arguments->self, known().live);
  if (Py_TYPE(held.ptr()) != communicator_type) return {};
  auto& communicator = *nb::inst_ptr<Communicator>(held);
  RequestPtr request = request_for_array(communicator, arguments->x, arguments->op, arguments->algorithm);
  if (request == nullptr) return arguments->algorithm.is_valid() ? nb::object() : on_device(*arguments, held, waits);
  return waits ? waited_for(*arguments, communicator, held, std::move(request))
               : begun(*arguments, communicator, held, request);
}

}  // namespace telegrad::bindings
