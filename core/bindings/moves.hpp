#pragma once
// The methods that begin an operation which moves data, or only waits.

#include "bindings/operation.hpp"
#include "session/moves.hpp"

namespace telegrad::bindings {

/// `Self`: see begin(); it also has size().
template <class Self>
void bind_moves(nb::class_<Self>& type) {
  using Pointer = std::shared_ptr<Self>;
  const auto blocking = nb::arg("blocking") = false;
  type.def(
          "all_gather",
          [](const Pointer& self, std::uintptr_t input, std::uintptr_t output, std::size_t bytes, DType dtype,
             bool caller_waits) {
            return begin(self,
                           make_all_gather(self->size(), dtype, memory<const std::byte>(input, bytes),
                                           memory<std::byte>(output, bytes * self->size())),
                           caller_waits);
          },
          nb::arg("input"), nb::arg("output"), nb::arg("bytes"), nb::arg("dtype"), blocking)
      .def(
          "broadcast",
          [](const Pointer& self, std::uintptr_t data, std::size_t bytes, DType dtype, Rank root,
             bool caller_waits) {
            return begin(self, make_broadcast(self->size(), dtype, memory<std::byte>(data, bytes), root),
                           caller_waits);
          },
          nb::arg("data"), nb::arg("bytes"), nb::arg("dtype"), nb::arg("root"), blocking)
      .def(
          "barrier",
          [](const Pointer& self, bool caller_waits) { return begin(self, make_barrier(), caller_waits); },
          blocking);
}

}  // namespace telegrad::bindings
