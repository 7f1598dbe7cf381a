#include "bindings/tensors.hpp"

#include <nanobind/stl/optional.h>

#include <string_view>

namespace telegrad::bindings {
namespace {

// A buffer's format in the words of Python's struct module, in native order and size.
std::optional<DType> dtype_of_format(std::string_view format, std::size_t element_bytes) {
  if (format == "f") return DType::f32;
  if (format == "d") return DType::f64;
  if (format == "e") return DType::f16;
  if (format == "?") return DType::boolean;
  if (format == "Zf") return DType::c64;
  if (format == "Zd") return DType::c128;
  if (format.size() != 1) return std::nullopt;
  constexpr std::string_view kSigned = "bhilq";
  constexpr std::string_view kUnsigned = "BHILQ";
  const bool is_signed = kSigned.find(format[0]) != std::string_view::npos;
  if (!is_signed && kUnsigned.find(format[0]) == std::string_view::npos) return std::nullopt;
  switch (element_bytes) {
    case 1: return is_signed ? DType::i8 : DType::u8;
    case 2: return is_signed ? DType::i16 : DType::u16;
    case 4: return is_signed ? DType::i32 : DType::u32;
    case 8: return is_signed ? DType::i64 : DType::u64;
    default: return std::nullopt;
  }
}

}  // namespace

bool is_array(nb::handle x) {
  static const nb::handle array = nb::object(nb::module_::import_("numpy").attr("ndarray")).release();  // for ever
  return x.type().is(array);
}

std::optional<HostBuffer> buffer_of(nb::handle owner, bool writable) {
  Py_buffer view;
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(owner.ptr(), &view, flags) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const auto element_bytes = static_cast<std::size_t>(view.itemsize);
  const auto nbytes = static_cast<std::size_t>(view.len);
  const auto dtype = dtype_of_format(view.format != nullptr ? view.format : "B", element_bytes);
  const auto pointer = reinterpret_cast<std::uintptr_t>(view.buf);
  PyBuffer_Release(&view);
  if (!dtype) return std::nullopt;
  return HostBuffer{pointer, nbytes / element_bytes, nbytes, *dtype};
}

void bind_tensors(nb::module_& module) {
  nb::class_<HostBuffer>(module, "HostBuffer")
      .def(
          "__init__",
          [](HostBuffer* self, std::uintptr_t pointer, std::size_t elements, std::size_t nbytes, DType dtype) {
            new (self) HostBuffer{pointer, elements, nbytes, dtype};
          },
          nb::arg("pointer"), nb::arg("elements"), nb::arg("nbytes"), nb::arg("dtype"))
      .def_ro("pointer", &HostBuffer::pointer)
      .def_ro("elements", &HostBuffer::elements)
      .def_ro("nbytes", &HostBuffer::nbytes)
      .def_ro("dtype", &HostBuffer::dtype);
  module.def("buffer_of", &buffer_of, nb::arg("owner"), nb::arg("writable"));
}

}  // namespace telegrad::bindings
