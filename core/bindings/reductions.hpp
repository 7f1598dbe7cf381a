#pragma once
// The methods that begin an operation which reduces.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/binding.hpp"
#include "bindings/operation.hpp"
#include "bindings/tensors.hpp"
#include "bindings/topk_state.hpp"
#include "codec/encode_values.hpp"
#include "collectives/dense/choice.hpp"
#include "collectives/sparse/choice.hpp"
#include "session/reductions.hpp"

namespace telegrad::bindings {

/// What chooses the algorithms of sums, as Python gives it to a communicator: the table of dense ones, and the network's
/// costs for sparse ones. `Self` has size(), allreduce_table(), use(table, costs, node_costs) and use_nodes(labels).
template <class Self>
void bind_allreduce_table(nb::class_<Self>& type) {
  type.def(
          "use_allreduce_table",
          [](Self& self, const std::vector<std::pair<std::size_t, Algorithm>>& choices,
             const std::optional<NetworkCosts>& costs, const std::optional<NetworkCosts>& inside,
             std::optional<double> beta_alone_s_per_byte) {
            std::vector<AllreduceChoice> rows;
            for (const auto& [from_bytes, algorithm] : choices) rows.push_back({from_bytes, algorithm});
            try {
              std::optional<NodeCosts> node_costs;
              if (inside) node_costs = NodeCosts{.inside = *inside, .beta_alone_s_per_byte = beta_alone_s_per_byte};
              self.use(choices.empty() ? AllreduceTable(self.size()) : AllreduceTable(self.size(), std::move(rows)), costs,
                       node_costs);
            } catch (const std::invalid_argument& error) {
              throw nb::value_error(error.what());
            }
          },
          nb::arg("choices"), nb::arg("costs").none() = nb::none(), nb::arg("inside").none() = nb::none(),
          nb::arg("beta_alone_s_per_byte").none() = nb::none())
      .def(
          "use_nodes",
          [](Self& self, const std::vector<std::uint32_t>& labels) {
            if (labels.size() != self.size()) {
              throw nb::value_error(("there are " + std::to_string(labels.size()) + " labels for " +
                                     std::to_string(self.size()) + " ranks: give one for each")
                                        .c_str());
            }
            self.use_nodes(labels);
          },
          nb::arg("labels"))
      .def(
          "choose_allreduce", [](const Self& self, std::size_t bytes) { return self.allreduce_table().choose(bytes, true); },
          nb::arg("bytes"));
}

/// A reduction by a C function void(T* into, const T* from, int64_t count), which Python keeps until the request is done.
struct AddressOfReduction {
  std::uintptr_t function = 0;
  std::uint64_t digest = 1;

  std::shared_ptr<const GivenReduction> of(DType dtype) const {
    using Function = void (*)(void*, const void*, std::int64_t);
    return std::make_shared<const GivenReduction>(GivenReduction{
        .combine = [call = reinterpret_cast<Function>(function)](
                       std::byte* into, const std::byte* from,
                       std::size_t count) { call(into, from, static_cast<std::int64_t>(count)); },
        .element = size_of(dtype),
        .digest = digest});
  }
};

/// Addresses of what a stream stages and takes, as Python gives them. `lost_form` 0: nobody wants what is lost.
struct StagedAddresses {
  std::uintptr_t count, indices, values;
  std::size_t room;
  std::uintptr_t form, sum_indices, sum_values;
  std::size_t sum_room;
  std::uintptr_t dense, lost_form, lost_indices, lost_values;
  std::size_t lost_room;
  std::uintptr_t lost;

  explicit StagedAddresses(const std::vector<std::uintptr_t>& all) {
    if (all.size() != 14) throw nb::value_error("staged must be 14 addresses and lengths");
    std::size_t i = 0;
    for (std::uintptr_t* one : {&count, &indices, &values, &room, &form, &sum_indices, &sum_values, &sum_room, &dense,
                                &lost_form, &lost_indices, &lost_values, &lost_room, &lost}) {
      *one = all[i++];
    }
  }

  template <class V>
  StagedEntries<V> entries(std::uint64_t n) const {
    return {.dimension = n,
            .count = reinterpret_cast<const std::int64_t*>(count),
            .indices = memory<const std::uint32_t>(indices, room),
            .values = memory<const V>(values, room)};
  }
  template <class V>
  StagedSum<V> sum(std::uint64_t n) const {
    return {.form = reinterpret_cast<std::int64_t*>(form),
            .indices = memory<std::uint32_t>(sum_indices, sum_room),
            .values = memory<V>(sum_values, sum_room),
            .dense = memory<V>(dense, n)};
  }
  StagedSum<float> errors(std::uint64_t n) const {
    return {.form = reinterpret_cast<std::int64_t*>(lost_form),
            .indices = memory<std::uint32_t>(lost_indices, lost_room),
            .values = memory<float>(lost_values, lost_room),
            .dense = memory<float>(lost, lost_form == 0 ? 0 : n)};
  }
};

/// Which algorithm it is follows from the state, a KeptTopkState.
template <class Kept, class Self>
void bind_all_reduce_topk(nb::class_<Self>& type) {
  type.def(
      "all_reduce_topk",
      [](const std::shared_ptr<Self>& self, std::uintptr_t indices, std::uintptr_t values, std::size_t nnz,
         std::uint64_t n, DType dtype, const SparseReduction& how, Kept& state, bool caller_waits) {
        if (state.in_use()) throw nb::value_error("the state is in use");
        return on_float_type(dtype, [&]<class V>(V) {
          const auto sum = make_all_reduce_topk(vector_of<V>(indices, values, nnz, n), state.settings(), state.state(),
                                                how.reduction, how.wire, how.residual);
          StartedCall begun = begin(self, sum, caller_waits);
          state.follow(sum);
          return begun;
        });
      },
      nb::arg("indices"), nb::arg("values"), nb::arg("nnz"), nb::arg("n"), nb::arg("dtype"), nb::arg("how"),
      nb::arg("state"), nb::arg("blocking") = false);
  type.def(
      "all_reduce_topk_staged",
      [](const std::shared_ptr<Self>& self, const std::vector<std::uintptr_t>& staged, std::uint64_t n, DType dtype,
         const SparseReduction& how, Kept& state, const Gate& opened) {
        if (state.in_use()) throw nb::value_error("the state is in use");
        const StagedAddresses at(staged);
        return on_float_type(dtype, [&]<class V>(V) {
          const auto sum = make_all_reduce_topk_staged(at.entries<V>(n), at.sum<V>(n), at.errors(n), state.settings(),
                                                       state.state(), how.reduction, how.wire);
          StartedCall begun = begin(self, sum, false, &opened);
          state.follow(sum);
          return begun;
        });
      },
      nb::arg("staged"), nb::arg("n"), nb::arg("dtype"), nb::arg("how"), nb::arg("state"), nb::arg("gate"));
}

/// `Self`: see begin(); it also has rank(), size(), allreduce_table(), nodes(), sparse_choice() and use(table, costs).
template <class Self>
void bind_reductions(nb::class_<Self>& type) {
  using Pointer = std::shared_ptr<Self>;
  const auto blocking = nb::arg("blocking") = false;
  const auto gate = nb::arg("gate").none() = nb::none();
  bind_allreduce_table(type);
  type.def(
          "all_reduce",
          [](const Pointer& self, std::uintptr_t input, std::uintptr_t output, std::size_t count, DType dtype,
             Reduction reduction, Algorithm algorithm, bool caller_waits, const Gate* gate) {
            const std::size_t bytes = count * size_of(dtype);
            return begin(self,
                           make_all_reduce(self->allreduce_table(), {.input = memory<const std::byte>(input, bytes),
                                                          .output = memory<std::byte>(output, bytes),
                                                          .dtype = dtype,
                                                          .reduction = reduction,
                                                          .algorithm = algorithm,
                                                          .nodes = self->nodes(),
                                                          .gated = gate != nullptr}),
                           caller_waits, gate);
          },
          nb::arg("input"), nb::arg("output"), nb::arg("count"), nb::arg("dtype"), nb::arg("reduction"),
          nb::arg("algorithm"), blocking, gate)
      .def(
          // Without `counts` and `root` an allreduce; with either a reduce_scatter or a reduce.
          "reduce_custom",
          [](const Pointer& self, std::uintptr_t input, std::uintptr_t output, std::size_t count, DType dtype,
             std::uintptr_t function, std::uint64_t digest, std::optional<Rank> root,
             const std::optional<std::vector<std::uint64_t>>& counts, bool caller_waits) {
            const std::size_t element = size_of(dtype);
            std::optional<Partition> partition;
            if (counts) partition.emplace(std::span(*counts));
            const std::size_t written = partition ? (*partition)[self->rank()].size() : count;
            const Dense dense{.input = memory<const std::byte>(input, count * element),
                              .output = memory<std::byte>(output, written * element),
                              .dtype = dtype,
                              .given = AddressOfReduction{function, digest}.of(dtype)};
            RequestPtr request = partition ? make_reduce_scatter(dense, *std::move(partition))
                                 : root    ? make_reduce(self->size(), dense, *root)
                                           : make_all_reduce(self->allreduce_table(), dense);
            return begin(self, std::move(request), caller_waits);
          },
          nb::arg("input"), nb::arg("output"), nb::arg("count"), nb::arg("dtype"), nb::arg("function"), nb::arg("digest"),
          nb::arg("root").none(), nb::arg("counts").none(), blocking)
      .def(
          "announce_all_reduce",
          [](const Pointer& self, std::uint64_t count, DType dtype, Reduction reduction) {
            return begin(self, make_announced_all_reduce(dtype, reduction, count), false);
          },
          nb::arg("count"), nb::arg("dtype"), nb::arg("reduction"))
      .def(
          "all_reduce_quantised",
          [](const Pointer& self, std::uintptr_t input, std::uintptr_t output, std::uintptr_t error, std::size_t count,
             Reduction reduction, ValueEncoding encoding, std::uint64_t seed, std::uint32_t call, bool caller_waits) {
            const std::size_t bytes = count * sizeof(float);
            return begin(self,
                         make_all_reduce_quantised({.input = memory<const std::byte>(input, bytes),
                                                    .output = memory<std::byte>(output, bytes),
                                                    .reduction = reduction},
                                                   {.encoding = encoding, .key = {.seed = seed, .call = call}},
                                                   memory<std::byte>(error, error == 0 ? 0 : bytes)),
                         caller_waits);
          },
          nb::arg("input"), nb::arg("output"), nb::arg("error"), nb::arg("count"), nb::arg("reduction"),
          nb::arg("encoding"), nb::arg("seed"), nb::arg("call"), blocking)
      .def(
          // Of a vector that is encoded: its bytes, and where this rank's slice, which is not, begins and ends, in elements
          // and in bytes. One or two ranks have none.
          "encoded_layout",
          [](const Self& self, std::size_t count, ValueEncoding encoding) {
            const Range own = self.size() > 2 ? quantised_slice(count, self.size(), self.rank()) : Range{0, 0};
            const auto bytes = [&](std::size_t elements) { return kernels::encoded_bytes(encoding, elements); };
            return std::vector<std::size_t>{bytes(count), own.begin, own.end, bytes(own.begin), bytes(own.end)};
          },
          nb::arg("count"), nb::arg("encoding"))
      .def(
          // Of a vector that a GPU encodes by the same `seed` and `call`; `own` and `error`: of that slice, or 0.
          "all_reduce_encoded",
          [](const Pointer& self, std::uintptr_t input, std::uintptr_t own, std::uintptr_t output, std::uintptr_t error,
             std::size_t count, Reduction reduction, ValueEncoding encoding, std::uint64_t seed, std::uint32_t call,
             const Gate& gate) {
            const std::size_t bytes = kernels::encoded_bytes(encoding, count);
            const std::size_t slice = own == 0 ? 0 : quantised_slice(count, self->size(), self->rank()).size();
            return begin(self,
                         make_all_reduce_encoded({.encoding = encoding, .key = {seed, call}, .reduction = reduction},
                                                 {.count = count,
                                                  .input = memory<const std::byte>(input, bytes),
                                                  .own = memory<const float>(own, slice),
                                                  .output = memory<std::byte>(output, bytes),
                                                  .error = memory<float>(error, error == 0 ? 0 : slice)}),
                         false, &gate);
          },
          nb::arg("input"), nb::arg("own"), nb::arg("output"), nb::arg("error"), nb::arg("count"), nb::arg("reduction"),
          nb::arg("encoding"), nb::arg("seed"), nb::arg("call"), nb::arg("gate"))
      .def(
          "reduce",
          [](const Pointer& self, std::uintptr_t input, std::uintptr_t output, std::size_t count, DType dtype,
             Reduction reduction, Rank root, bool caller_waits, const Gate* gate) {
            const std::size_t bytes = count * size_of(dtype);
            return begin(self,
                         make_reduce(self->size(),
                                     {.input = memory<const std::byte>(input, bytes),
                                      .output = memory<std::byte>(output, bytes),
                                      .dtype = dtype,
                                      .reduction = reduction},
                                     root),
                         caller_waits, gate);
          },
          nb::arg("input"), nb::arg("output"), nb::arg("count"), nb::arg("dtype"), nb::arg("reduction"),
          nb::arg("root"), blocking, gate)
      .def(
          "reduce_scatter",
          [](const Pointer& self, std::uintptr_t input, std::uintptr_t output, const std::vector<std::uint64_t>& counts,
             DType dtype, Reduction reduction, bool caller_waits, const Gate* gate) {
            Partition partition{std::span(counts)};
            const Dense dense{.input = memory<const std::byte>(input, partition.count() * size_of(dtype)),
                              .output = memory<std::byte>(output, partition[self->rank()].size() * size_of(dtype)),
                              .dtype = dtype,
                              .reduction = reduction};
            return begin(self, make_reduce_scatter(dense, std::move(partition)), caller_waits, gate);
          },
          nb::arg("input"), nb::arg("output"), nb::arg("counts"), nb::arg("dtype"), nb::arg("reduction"), blocking, gate)
      .def(
          "all_reduce_sparse",
          [](const Pointer& self, std::uintptr_t indices, std::uintptr_t values, std::size_t nnz, std::uintptr_t marks,
             std::uint64_t n, DType dtype, SparseReduction how, bool caller_waits) {
            how.choice = self->sparse_choice();
            how.nodes = self->nodes();
            how.is_unsigned = is_unsigned(dtype);
            return on_entry_type(dtype, [&]<class V>(V) {
              return begin(self, make_all_reduce(addend_at<V>(indices, values, nnz, marks, n, how), how), caller_waits);
            });
          },
          nb::arg("indices"), nb::arg("values"), nb::arg("nnz"), nb::arg("marks"), nb::arg("n"), nb::arg("dtype"),
          nb::arg("how"), blocking)
      .def(
          "all_reduce_sparse_into",
          [](const Pointer& self, std::uintptr_t indices, std::uintptr_t values, std::size_t nnz, std::uintptr_t marks,
             std::uint64_t n, DType dtype, SparseReduction how, std::uintptr_t output, bool caller_waits) {
            how.choice = self->sparse_choice();
            how.nodes = self->nodes();
            how.is_unsigned = is_unsigned(dtype);
            return on_entry_type(dtype, [&]<class V>(V) {
              SparseVector<V> vector = addend_at<V>(indices, values, nnz, marks, n, how);
              return begin(self, make_all_reduce_into(std::move(vector), memory<V>(output, n), how), caller_waits);
            });
          },
          nb::arg("indices"), nb::arg("values"), nb::arg("nnz"), nb::arg("marks"), nb::arg("n"), nb::arg("dtype"),
          nb::arg("how"), nb::arg("output"), blocking)
      .def(
          // Of entries that a stream has staged once the gate is open.
          "all_reduce_staged",
          [](const Pointer& self, const std::vector<std::uintptr_t>& staged, std::uint64_t n, DType dtype,
             SparseReduction how, const Gate& opened) {
            how.choice = self->sparse_choice();
            how.nodes = self->nodes();
            how.is_unsigned = is_unsigned(dtype);
            const StagedAddresses at(staged);
            return on_entry_type(dtype, [&]<class V>(V) {
              return begin(self, make_all_reduce_staged(at.entries<V>(n), at.sum<V>(n), how, at.errors(n)), false, &opened);
            });
          },
          nb::arg("staged"), nb::arg("n"), nb::arg("dtype"), nb::arg("how"), nb::arg("gate"))
      .def(
          "reduce_scatter_staged",
          [](const Pointer& self, const std::vector<std::uintptr_t>& staged, std::uint64_t n, DType dtype,
             SparseReduction how, const std::optional<std::vector<std::uint64_t>>& counts, const Gate& opened) {
            how.is_unsigned = is_unsigned(dtype);
            const StagedAddresses at(staged);
            const Partition slices = counts ? Partition(std::span(*counts)) : Partition(n, self->size());
            const std::uint64_t own = slices[self->rank()].size();
            return on_entry_type(dtype, [&]<class V>(V) {
              return begin(self, make_reduce_scatter_staged(at.entries<V>(n), slices, at.sum<V>(own), how, at.errors(n)),
                           false, &opened);
            });
          },
          nb::arg("staged"), nb::arg("n"), nb::arg("dtype"), nb::arg("how"), nb::arg("counts").none(), nb::arg("gate"))
      .def(
          "all_gather_staged",
          [](const Pointer& self, const std::vector<std::uintptr_t>& staged, std::uint64_t n, DType dtype,
             SparseReduction how, const Gate& opened) {
            how.is_unsigned = is_unsigned(dtype);
            const StagedAddresses at(staged);
            return on_entry_type(dtype, [&]<class V>(V) {
              return begin(self, make_all_gather_staged(at.entries<V>(n), at.sum<V>(0), how, at.errors(n)), false,
                           &opened);
            });
          },
          nb::arg("staged"), nb::arg("n"), nb::arg("dtype"), nb::arg("how"), nb::arg("gate"))
      .def(
          "average_gathered_staged",
          [](const Pointer& self, const std::vector<std::uintptr_t>& staged, std::uint64_t n, DType dtype,
             const SparseReduction& how, const Gate& opened) {
            const StagedAddresses at(staged);
            return on_float_type(dtype, [&]<class V>(V) {
              return begin(self, make_average_gathered_staged(at.entries<V>(n), at.sum<V>(n), how, at.errors(n)), false,
                           &opened);
            });
          },
          nb::arg("staged"), nb::arg("n"), nb::arg("dtype"), nb::arg("how"), nb::arg("gate"))
      .def(
          // `counts`: of each rank's slice; none: all alike.
          "reduce_scatter_sparse",
          [](const Pointer& self, std::uintptr_t indices, std::uintptr_t values, std::size_t nnz, std::uint64_t n,
             const std::optional<std::vector<std::uint64_t>>& counts, DType dtype, SparseReduction how,
             bool caller_waits) {
            Partition slices = counts ? Partition(std::span(*counts)) : Partition(n, self->size());
            how.is_unsigned = is_unsigned(dtype);
            return on_entry_type(dtype, [&]<class V>(V) {
              SparseVector<V> vector = vector_of<V>(indices, values, nnz, n);
              return begin(self, make_reduce_scatter(std::move(vector), std::move(slices), how), caller_waits);
            });
          },
          nb::arg("indices"), nb::arg("values"), nb::arg("nnz"), nb::arg("n"), nb::arg("counts").none(),
          nb::arg("dtype"), nb::arg("how"), blocking);
  bind_all_reduce_topk<KeptOkTopk>(type);
  bind_all_reduce_topk<KeptGTopk>(type);
  bind_all_reduce_topk<KeptBoundedTopk>(type);
}

}  // namespace telegrad::bindings
