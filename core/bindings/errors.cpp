#include "bindings/errors.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "session/report.hpp"
#include "transport/failure.hpp"

namespace telegrad::bindings {
namespace {

namespace nb = nanobind;

nb::object rank_or_none(Rank rank) { return rank == kNoRank ? nb::none() : nb::cast(rank); }

// What a peer says need not be UTF-8; a decoding error would take the place of this one.
nb::object text_of(const std::string& bytes) {
  return nb::steal(PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

nb::object text_or_none(const std::string& bytes) { return bytes.empty() ? nb::none() : text_of(bytes); }

void raise_transport_error(const Failure& failure) {
  try {
    const nb::object type = nb::module_::import_("telegrad.errors").attr(error_name(failure.kind));
    const nb::object error =
        type(text_of(failure.message()), nb::arg("rank") = rank_or_none(failure.rank),
             nb::arg("peer") = rank_or_none(failure.peer),
             nb::arg("host") = text_or_none(failure.host), nb::arg("operation") = text_of(failure.operation),
             nb::arg("tag") = failure.tag.value_or(failure.sequence),
             nb::arg("group") = failure.group ? text_or_none(failure.group->name) : nb::none(),
             nb::arg("parent_rank") = rank_or_none(failure.in_parent(failure.rank)),
             nb::arg("parent_peer") = rank_or_none(failure.in_parent(failure.peer)));
    PyErr_SetObject(type.ptr(), error.ptr());
  } catch (nb::python_error& error) {
    error.restore();
  }
}

}  // namespace

void translate_transport_errors() {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const TransportError& error) {
      raise_transport_error(error.failure());
    }
  });
}

}  // namespace telegrad::bindings
