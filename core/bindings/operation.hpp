#pragma once
// Operations as Python sees them: the object that it waits for, and the methods that begin one, for every class that
// runs Requests (an engine's Communicator, a simulated one).

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/binding.hpp"
#include "progress/engine.hpp"
#include "session/operations.hpp"

namespace telegrad::bindings {

// How long a wait may go without a look at Python's signals.
inline constexpr double kSignalSlice_s = 0.1;

// Calls `attempt(deadline)` without the interpreter's lock until it is true or the time is over.
template <class Attempt>
bool with_signals(double deadline_s, Attempt attempt) {
  while (true) {
    bool over = false;
    {
      const nb::gil_scoped_release unlocked;
      over = attempt(std::min(deadline_s, Engine::now_s() + kSignalSlice_s));
    }
    if (over) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (Engine::now_s() >= deadline_s) return false;
  }
}

template <class V>
nb::object owned_array(Array<V> array) {
  const std::size_t size = array.size();
  auto* const kept = new Array<V>(std::move(array));
  const nb::capsule owner(kept, [](void* pointer) noexcept { delete static_cast<Array<V>*>(pointer); });
  using Element = std::conditional_t<std::is_same_v<V, bf16>, std::uint16_t, V>;
  return nb::cast(nb::ndarray<nb::numpy, Element, nb::ndim<1>>(kept->data(), {size}, owner));
}

// (indices or None when dense, values); bf16 values as their 16 bits.
template <class V>
nb::object stream_as_arrays(SparseStream<V> stream) {
  if (stream.is_dense()) return nb::make_tuple(nb::none(), owned_array(stream.take_values()));
  nb::object indices = owned_array(stream.take_indices());
  return nb::make_tuple(std::move(indices), owned_array(stream.take_values()));
}

template <class V>
SparseStream<V> stream_of(std::uintptr_t indices, std::uintptr_t values, std::size_t nnz, std::uint64_t n) {
  return SparseStream<V>::sparse(n, memory<const std::uint32_t>(indices, nnz), memory<const V>(values, nnz));
}

class Operation {
 public:
  /// True once the request is done; false at the deadline (Engine::now_s()) or earlier.
  using Wait = std::function<bool(const Request&, double deadline_s)>;

  Operation(Wait wait, RequestPtr request) : wait_(std::move(wait)), request_(std::move(request)) {}
  template <class V>
  Operation(Wait wait, SparseSum<V> sum) : Operation(std::move(wait), std::move(sum.request)) {
    take_result_ = [result = std::move(sum.result)] { return stream_as_arrays(std::move(**result)); };
  }

  Request& request() const { return *request_; }

  bool wait(std::optional<double> timeout_s) const {
    const double deadline_s = timeout_s ? Engine::now_s() + *timeout_s : std::numeric_limits<double>::infinity();
    const bool done = with_signals(deadline_s, [this](double slice_s) { return wait_(*request_, slice_s); });
    if (done) request_->rethrow();
    return done;
  }

  nb::object sparse_result() {
    if (!take_result_ || !request_->done() || request_->failure()) {
      throw nb::value_error("no sparse result: wait for a sparse operation first, and take its result once");
    }
    return std::exchange(take_result_, nullptr)();
  }

 private:
  Wait wait_;  // keeps the communicator
  RequestPtr request_;
  std::function<nb::object()> take_result_;
};

/// Methods that begin an operation. `Self` has size(), submit(request, blocking) and wait(request, deadline_s).
template <class Self>
void bind_operations(nb::class_<Self>& type) {
  using Pointer = std::shared_ptr<Self>;
  const auto running = [](const Pointer& self, auto started, bool blocking) {
    if constexpr (requires { started.request; }) {
      self->submit(started.request, blocking);
    } else {
      self->submit(started, blocking);
    }
    return Operation([self](const Request& request, double slice_s) { return self->wait(request, slice_s); },
                     std::move(started));
  };
  const auto blocking = nb::arg("blocking") = false;
  type.def(
          "all_reduce",
          [running](const Pointer& self, std::uintptr_t input, std::uintptr_t output, std::size_t count, DType dtype,
                    Reduction reduction, Algorithm algorithm, bool caller_waits) {
            const std::size_t bytes = count * size_of(dtype);
            return running(self,
                           make_all_reduce(self->size(), {.input = memory<const std::byte>(input, bytes),
                                                          .output = memory<std::byte>(output, bytes),
                                                          .dtype = dtype,
                                                          .reduction = reduction,
                                                          .algorithm = algorithm}),
                           caller_waits);
          },
          nb::arg("input"), nb::arg("output"), nb::arg("count"), nb::arg("dtype"), nb::arg("reduction"),
          nb::arg("algorithm"), blocking)
      .def(
          "all_reduce_sparse",
          [running](const Pointer& self, std::uintptr_t indices, std::uintptr_t values, std::size_t nnz,
                    std::uint64_t n, DType dtype, Reduction reduction, Algorithm, double switch_factor,
                    bool caller_waits) {
            const auto begin = [&]<class V>(SparseStream<V> stream) {
              return running(self, make_all_reduce(std::move(stream), reduction, switch_factor), caller_waits);
            };
            if (dtype == DType::bf16) return begin(stream_of<bf16>(indices, values, nnz, n));
            return begin(stream_of<float>(indices, values, nnz, n));
          },
          nb::arg("indices"), nb::arg("values"), nb::arg("nnz"), nb::arg("n"), nb::arg("dtype"), nb::arg("reduction"),
          nb::arg("algorithm"), nb::arg("switch_factor"), blocking)
      .def(
          "all_reduce_sparse_into",
          [running](const Pointer& self, std::uintptr_t indices, std::uintptr_t values, std::size_t nnz,
                    std::uint64_t n, DType dtype, Reduction reduction, Algorithm, double switch_factor,
                    std::uintptr_t output, bool caller_waits) {
            const auto begin = [&]<class V>(SparseStream<V> stream) {
              return running(
                  self, make_all_reduce_into(std::move(stream), memory<V>(output, n), reduction, switch_factor),
                  caller_waits);
            };
            if (dtype == DType::bf16) return begin(stream_of<bf16>(indices, values, nnz, n));
            return begin(stream_of<float>(indices, values, nnz, n));
          },
          nb::arg("indices"), nb::arg("values"), nb::arg("nnz"), nb::arg("n"), nb::arg("dtype"), nb::arg("reduction"),
          nb::arg("algorithm"), nb::arg("switch_factor"), nb::arg("output"), blocking)
      .def(
          "all_gather",
          [running](const Pointer& self, std::uintptr_t input, std::uintptr_t output, std::size_t bytes, DType dtype,
                    bool caller_waits) {
            return running(self,
                           make_all_gather(self->size(), dtype, memory<const std::byte>(input, bytes),
                                           memory<std::byte>(output, bytes * self->size())),
                           caller_waits);
          },
          nb::arg("input"), nb::arg("output"), nb::arg("bytes"), nb::arg("dtype"), blocking)
      .def(
          "broadcast",
          [running](const Pointer& self, std::uintptr_t data, std::size_t bytes, DType dtype, Rank root,
                    bool caller_waits) {
            return running(self, make_broadcast(self->size(), dtype, memory<std::byte>(data, bytes), root),
                           caller_waits);
          },
          nb::arg("data"), nb::arg("bytes"), nb::arg("dtype"), nb::arg("root"), blocking)
      .def(
          "barrier",
          [running](const Pointer& self, bool caller_waits) { return running(self, make_barrier(), caller_waits); },
          blocking);
}

inline nb::dict as_dict(const Session::Counters& counters) {
  nb::dict result;
  result["operations"] = counters.operations;
  result["messages_sent"] = counters.messages_sent;
  result["messages_received"] = counters.messages_received;
  result["bytes_sent"] = counters.bytes_sent;
  result["bytes_received"] = counters.bytes_received;
  return result;
}

}  // namespace telegrad::bindings
