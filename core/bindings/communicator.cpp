#include "progress/communicator.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>

#include "bindings/binding.hpp"
#include "drivers/local/local_driver.hpp"
#include "drivers/ucx/ucx_driver.hpp"
#include "progress/completion_queue.hpp"

namespace telegrad::bindings {
namespace {

using CommunicatorPtr = std::shared_ptr<Communicator>;

// How long a wait may go without a look at Python's signals.
constexpr double kSignalSlice_s = 0.1;
constexpr double kJoinMost_s = 60.0;

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

class Operation {
 public:
  Operation(CommunicatorPtr communicator, RequestPtr request)
      : communicator_(std::move(communicator)), request_(std::move(request)) {}
  template <class V>
  Operation(CommunicatorPtr communicator, SparseSum<V> sum)
      : communicator_(std::move(communicator)), request_(std::move(sum.request)) {
    take_result_ = [result = std::move(sum.result)] { return stream_as_arrays(std::move(**result)); };
  }

  Request& request() const { return *request_; }

  bool wait(std::optional<double> timeout_s) const {
    const double deadline_s =
        timeout_s ? Engine::now_s() + *timeout_s : std::numeric_limits<double>::infinity();
    const bool done = with_signals(
        deadline_s, [this](double slice_s) { return communicator_->wait(*request_, slice_s); });
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
  CommunicatorPtr communicator_;
  RequestPtr request_;
  std::function<nb::object()> take_result_;
};

std::vector<CommunicatorPtr> make_local(Rank size, double timeout_s) {
  const auto network = std::make_shared<LocalNetwork>(size);
  const auto engine = Engine::shared();
  std::vector<CommunicatorPtr> all;
  for (Rank rank = 0; rank < size; ++rank) {
    auto driver = std::make_unique<LocalDriver>(network, rank);
    // One engine runs all ranks, so none can fall silent without the others.
    const SessionOptions options{.timeout_s = timeout_s, .liveness_timeout_s = std::nullopt};
    all.push_back(std::make_shared<Communicator>(engine, std::move(driver), options));
  }
  for (const auto& communicator : all) communicator->join();
  for (const auto& communicator : all) {
    with_signals(Engine::now_s() + kJoinMost_s,
                 [&](double slice_s) { return communicator->await_join(slice_s); });
  }
  return all;
}

CommunicatorPtr make_ucx(Rank rank, Rank size, const nb::callable& exchange, double timeout_s,
                         std::optional<double> liveness_timeout_s, const std::optional<std::string>& interface) {
  auto driver = std::make_unique<UcxDriver>(rank, size, UcxOptions{.interface = interface.value_or("")});
  const std::vector<std::byte> address = driver->address();
  std::uint32_t epoch = std::random_device{}();
  std::vector<std::byte> mine(sizeof epoch + address.size());
  std::memcpy(mine.data(), &epoch, sizeof epoch);
  std::ranges::copy(address, mine.begin() + sizeof epoch);

  const nb::object answer = exchange(nb::bytes(mine.data(), mine.size()));
  std::vector<std::vector<std::byte>> addresses;
  for (const nb::handle item : answer) {
    const auto blob = nb::cast<nb::bytes>(item);
    if (blob.size() <= sizeof epoch) throw nb::value_error("exchange returned a blob that is no address");
    if (addresses.empty()) std::memcpy(&epoch, blob.c_str(), sizeof epoch);
    const auto* const first = reinterpret_cast<const std::byte*>(blob.c_str());
    addresses.emplace_back(first + sizeof epoch, first + blob.size());
  }
  if (addresses.size() != size) {
    throw nb::value_error(("exchange returned " + std::to_string(addresses.size()) + " addresses for size=" +
                           std::to_string(size) + " ranks")
                              .c_str());
  }
  driver->connect(addresses);
  const SessionOptions options{.epoch = epoch, .timeout_s = timeout_s, .liveness_timeout_s = liveness_timeout_s};
  auto communicator = std::make_shared<Communicator>(Engine::shared(), std::move(driver), options);
  communicator->join();
  const double join_s = std::min(timeout_s, kJoinMost_s);
  if (!with_signals(Engine::now_s() + join_s,
                    [&](double slice_s) { return communicator->await_join(slice_s); })) {
    communicator->give_up_join(join_s);
  }
  return communicator;
}

template <class V>
SparseStream<V> stream_of(std::uintptr_t indices, std::uintptr_t values, std::size_t nnz, std::uint64_t n) {
  return SparseStream<V>::sparse(n, memory<const std::uint32_t>(indices, nnz), memory<const V>(values, nnz));
}

Operation all_reduce_sparse(const CommunicatorPtr& self, std::uintptr_t indices, std::uintptr_t values,
                            std::size_t nnz, std::uint64_t n, DType dtype, Reduction reduction, Algorithm,
                            double switch_factor, bool blocking) {
  if (dtype == DType::bf16) {
    return {self, self->all_reduce(stream_of<bf16>(indices, values, nnz, n), reduction, switch_factor, blocking)};
  }
  return {self, self->all_reduce(stream_of<float>(indices, values, nnz, n), reduction, switch_factor, blocking)};
}

Operation all_reduce_sparse_into(const CommunicatorPtr& self, std::uintptr_t indices, std::uintptr_t values,
                                 std::size_t nnz, std::uint64_t n, DType dtype, Reduction reduction, Algorithm,
                                 double switch_factor, std::uintptr_t output, bool blocking) {
  if (dtype == DType::bf16) {
    return {self, self->all_reduce_into(stream_of<bf16>(indices, values, nnz, n), memory<bf16>(output, n), reduction,
                                        switch_factor, blocking)};
  }
  return {self, self->all_reduce_into(stream_of<float>(indices, values, nnz, n), memory<float>(output, n), reduction,
                                      switch_factor, blocking)};
}

nb::dict counters_of(Communicator& self) {
  Session::Counters counters;
  {
    const nb::gil_scoped_release unlocked;
    counters = self.counters();
  }
  nb::dict result;
  result["operations"] = counters.operations;
  result["messages_sent"] = counters.messages_sent;
  result["messages_received"] = counters.messages_received;
  result["bytes_sent"] = counters.bytes_sent;
  result["bytes_received"] = counters.bytes_received;
  return result;
}

}  // namespace

void bind_communicator(nb::module_& module) {
  nb::class_<Operation>(module, "Request")
      .def("wait", &Operation::wait, nb::arg("timeout_s") = nb::none())
      .def("done", [](const Operation& self) { return self.request().done(); })
      .def("sparse_result", &Operation::sparse_result);

  nb::class_<CompletionQueue>(module, "CompletionQueue")
      .def(nb::init<>())
      .def("watch",
           [](CompletionQueue& self, const Operation& operation, std::uint64_t token) {
             self.watch(operation.request(), token);
           })
      .def(
          "next",
          [](CompletionQueue& self, double timeout_s) { return self.next(std::chrono::duration<double>(timeout_s)); },
          nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>())
      .def("close", &CompletionQueue::close);

  const auto blocking = nb::arg("blocking") = false;
  nb::class_<Communicator>(module, "Communicator")
      .def_static("local", &make_local, nb::arg("size"), nb::arg("timeout_s"))
      .def_static("ucx", &make_ucx, nb::arg("rank"), nb::arg("size"), nb::arg("exchange"), nb::arg("timeout_s"),
                  nb::arg("liveness_timeout_s").none(), nb::arg("interface").none())
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("driver", &Communicator::driver_name)
      .def(
          "all_reduce",
          [](const CommunicatorPtr& self, std::uintptr_t input, std::uintptr_t output, std::size_t count, DType dtype,
             Reduction reduction, Algorithm algorithm, bool caller_waits) {
            const std::size_t bytes = count * size_of(dtype);
            return Operation(self, self->all_reduce({.input = memory<const std::byte>(input, bytes),
                                                     .output = memory<std::byte>(output, bytes),
                                                     .dtype = dtype,
                                                     .reduction = reduction,
                                                     .algorithm = algorithm},
                                                    caller_waits));
          },
          nb::arg("input"), nb::arg("output"), nb::arg("count"), nb::arg("dtype"), nb::arg("reduction"),
          nb::arg("algorithm"), blocking)
      .def("all_reduce_sparse", &all_reduce_sparse, nb::arg("indices"), nb::arg("values"), nb::arg("nnz"),
           nb::arg("n"), nb::arg("dtype"), nb::arg("reduction"), nb::arg("algorithm"), nb::arg("switch_factor"),
           blocking)
      .def("all_reduce_sparse_into", &all_reduce_sparse_into, nb::arg("indices"), nb::arg("values"), nb::arg("nnz"),
           nb::arg("n"), nb::arg("dtype"), nb::arg("reduction"), nb::arg("algorithm"), nb::arg("switch_factor"),
           nb::arg("output"), blocking)
      .def(
          "all_gather",
          [](const CommunicatorPtr& self, std::uintptr_t input, std::uintptr_t output, std::size_t bytes,
             bool caller_waits) {
            return Operation(self, self->all_gather(memory<const std::byte>(input, bytes),
                                                    memory<std::byte>(output, bytes * self->size()), caller_waits));
          },
          nb::arg("input"), nb::arg("output"), nb::arg("bytes"), blocking)
      .def(
          "broadcast",
          [](const CommunicatorPtr& self, std::uintptr_t data, std::size_t bytes, Rank root, bool caller_waits) {
            return Operation(self, self->broadcast(memory<std::byte>(data, bytes), root, caller_waits));
          },
          nb::arg("data"), nb::arg("bytes"), nb::arg("root"), blocking)
      .def(
          "barrier",
          [](const CommunicatorPtr& self, bool caller_waits) { return Operation(self, self->barrier(caller_waits)); },
          blocking)
      .def("abort", &Communicator::abort, nb::arg("reason"), nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Communicator::close, nb::call_guard<nb::gil_scoped_release>())
      .def("counters", &counters_of);

  module.def("ucx_version", &UcxDriver::version);
}

}  // namespace telegrad::bindings
