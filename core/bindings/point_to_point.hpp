#pragma once
// The methods that begin a message between two ranks.

#include "bindings/operation.hpp"
#include "session/messages.hpp"

namespace telegrad::bindings {

/// `Self`: see begin(). `sendrecv` is a send and a receive at once, over when both are.
template <class Self>
void bind_point_to_point(nb::class_<Self>& type) {
  using Pointer = std::shared_ptr<Self>;
  const auto blocking = nb::arg("blocking") = false;
  const auto gate = nb::arg("gate").none() = nb::none();
  type.def(
          "send",
          [](const Pointer& self, std::uintptr_t data, std::size_t bytes, DType dtype, Rank to, Step tag,
             bool caller_waits, const Gate* gate) {
            return begin(self, make_send(dtype, memory<const std::byte>(data, bytes), to, tag), caller_waits, gate);
          },
          nb::arg("data"), nb::arg("bytes"), nb::arg("dtype"), nb::arg("to"), nb::arg("tag"), blocking, gate)
      .def(
          "recv",
          [](const Pointer& self, std::uintptr_t data, std::size_t bytes, DType dtype, std::optional<Rank> source,
             Step tag, bool caller_waits, const Gate* gate) {
            return begin(self, make_receive(dtype, memory<std::byte>(data, bytes), source.value_or(kNoRank), tag),
                         caller_waits, gate);
          },
          nb::arg("data"), nb::arg("bytes"), nb::arg("dtype"), nb::arg("source").none(), nb::arg("tag"), blocking, gate)
      .def(
          "sendrecv",
          [](const Pointer& self, std::uintptr_t data, std::size_t bytes, DType dtype, Rank to, std::uintptr_t into,
             std::size_t into_bytes, DType into_dtype, Rank source, Step tag, bool caller_waits) {
            const RequestPtr received = make_receive(into_dtype, memory<std::byte>(into, into_bytes), source, tag);
            const RequestPtr sent = make_send(dtype, memory<const std::byte>(data, bytes), to, tag);
            for (const RequestPtr& request : {received, sent}) self->submit(request, caller_waits);
            return StartedCall([self](const Request& request, double slice_s) { return self->wait(request, slice_s); },
                             received, sent);
          },
          nb::arg("data"), nb::arg("bytes"), nb::arg("dtype"), nb::arg("to"), nb::arg("into"), nb::arg("into_bytes"),
          nb::arg("into_dtype"), nb::arg("source"), nb::arg("tag"), blocking);
}

}  // namespace telegrad::bindings
