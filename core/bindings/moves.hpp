#pragma once
// The methods that begin an operation which moves data, or only waits. Lengths are in bytes.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "bindings/operation.hpp"
#include "session/moves.hpp"

namespace telegrad::bindings {

/// By rank; none: all are `bytes` long.
using Lengths = std::optional<std::vector<std::size_t>>;

inline Partition blocks_of(Rank size, std::size_t bytes, const Lengths& lengths) {
  return lengths ? Partition(*lengths) : Partition(size * bytes, size);
}

/// `Self`: see begin(); it also has rank() and size().
template <class Self>
void bind_moves(nb::class_<Self>& type) {
  using Pointer = std::shared_ptr<Self>;
  const auto blocking = nb::arg("blocking") = false;
  const auto gate = nb::arg("gate").none() = nb::none();
  const auto lengths = nb::arg("lengths").none() = nb::none();
  type.def(
          "all_gather",
          [](const Pointer& self, std::uintptr_t input, std::uintptr_t output, std::size_t bytes, DType dtype,
             const Lengths& by_rank, bool caller_waits, const Gate* gate) {
            const Partition blocks = blocks_of(self->size(), bytes, by_rank);
            return begin(self,
                         make_all_gather(dtype, memory<const std::byte>(input, bytes),
                                         memory<std::byte>(output, blocks.count()), blocks),
                         caller_waits, gate);
          },
          nb::arg("input"), nb::arg("output"), nb::arg("bytes"), nb::arg("dtype"), lengths, blocking, gate)
      .def(
          "all_gather_sparse",
          [](const Pointer& self, std::uintptr_t indices, std::uintptr_t values, std::size_t nnz, std::uint64_t n,
             DType dtype, SparseReduction how, bool caller_waits) {
            how.is_unsigned = is_unsigned(dtype);
            return on_entry_type(dtype, [&]<class V>(V) {
              return begin(self, make_all_gather(vector_of<V>(indices, values, nnz, n), how), caller_waits);
            });
          },
          nb::arg("indices"), nb::arg("values"), nb::arg("nnz"), nb::arg("n"), nb::arg("dtype"), nb::arg("how"), blocking)
      .def(
          "gather",
          [](const Pointer& self, std::uintptr_t input, std::uintptr_t output, std::size_t bytes, DType dtype,
             Rank root, const Lengths& by_rank, bool caller_waits, const Gate* gate) {
            const Partition blocks = blocks_of(self->size(), bytes, by_rank);
            const std::size_t all = self->rank() == root ? blocks.count() : 0;
            return begin(self,
                         make_gather(dtype, memory<const std::byte>(input, bytes), memory<std::byte>(output, all),
                                     blocks, root),
                         caller_waits, gate);
          },
          nb::arg("input"), nb::arg("output"), nb::arg("bytes"), nb::arg("dtype"), nb::arg("root"), lengths, blocking, gate)
      .def(
          "scatter",
          [](const Pointer& self, std::uintptr_t input, std::uintptr_t output, std::size_t bytes, DType dtype,
             Rank root, const Lengths& by_rank, bool caller_waits, const Gate* gate) {
            const Partition blocks = blocks_of(self->size(), bytes, by_rank);
            const std::size_t all = self->rank() == root ? blocks.count() : 0;
            return begin(self,
                         make_scatter(dtype, memory<const std::byte>(input, all), memory<std::byte>(output, bytes),
                                      blocks, root),
                         caller_waits, gate);
          },
          nb::arg("input"), nb::arg("output"), nb::arg("bytes"), nb::arg("dtype"), nb::arg("root"), lengths, blocking, gate)
      .def(
          "all_to_all",
          [](const Pointer& self, std::uintptr_t input, std::uintptr_t output, std::size_t bytes, DType dtype,
             bool caller_waits, const Gate* gate) {
            return begin(self,
                         make_all_to_all(self->size(), dtype, memory<const std::byte>(input, bytes),
                                         memory<std::byte>(output, bytes)),
                         caller_waits, gate);
          },
          nb::arg("input"), nb::arg("output"), nb::arg("bytes"), nb::arg("dtype"), blocking, gate)
      .def(
          "all_to_all_v",
          [](const Pointer& self, std::uintptr_t input, std::uintptr_t output, const std::vector<std::size_t>& sent,
             const std::vector<std::size_t>& received, DType dtype, bool caller_waits, const Gate* gate) {
            const Partition leaving(sent);
            const Partition coming(received);
            return begin(self,
                         make_all_to_all_v(dtype, memory<const std::byte>(input, leaving.count()),
                                           memory<std::byte>(output, coming.count()), leaving, coming),
                         caller_waits, gate);
          },
          nb::arg("input"), nb::arg("output"), nb::arg("sent"), nb::arg("received"), nb::arg("dtype"), blocking, gate)
      .def(
          "broadcast",
          [](const Pointer& self, std::uintptr_t data, std::size_t bytes, DType dtype, Rank root,
             bool caller_waits, const Gate* gate) {
            return begin(self, make_broadcast(self->size(), dtype, memory<std::byte>(data, bytes), root),
                         caller_waits, gate);
          },
          nb::arg("data"), nb::arg("bytes"), nb::arg("dtype"), nb::arg("root"), blocking, gate)
      .def(
          "barrier",
          [](const Pointer& self, bool caller_waits) { return begin(self, make_barrier(), caller_waits); },
          blocking);
}

}  // namespace telegrad::bindings
