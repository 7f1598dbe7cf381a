#include "progress/communicator.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <memory>
#include <random>

#include "bindings/driver_capsule.hpp"
#include "bindings/moves.hpp"
#include "bindings/point_to_point.hpp"
#include "bindings/reductions.hpp"
#include "bindings/unlocked.hpp"
#include "drivers/local/local_driver.hpp"
#include "drivers/ucx/join_failure.hpp"
#include "drivers/ucx/ucx_driver.hpp"
#include "joining/join.hpp"
#include "joining/ucx.hpp"
#include "progress/report_signal.hpp"

namespace telegrad::bindings {
namespace {

using CommunicatorPtr = std::shared_ptr<Communicator>;

constexpr double kJoinMost_s = 60.0;

// Of split(): its name in errors, and the parent's ranks that are in it, by rank; none without a name.
std::shared_ptr<const Group> group_named(const std::string& name, std::vector<Rank> parent_ranks) {
  return name.empty() ? nullptr : std::make_shared<const Group>(Group{name, std::move(parent_ranks)});
}

constexpr double kNever_s = std::numeric_limits<double>::infinity();

std::vector<CommunicatorPtr> make_local(Rank size, double timeout_s, const std::string& report_folder,
                                        const std::string& group_name, std::vector<Rank> parent_ranks, double stall_s) {
  const auto group = group_named(group_name, std::move(parent_ranks));
  const std::uint32_t epoch = std::random_device{}();
  const auto network = std::make_shared<LocalNetwork>(size);
  const auto engine = Engine::shared();
  std::vector<CommunicatorPtr> all;
  for (Rank rank = 0; rank < size; ++rank) {
    auto driver = std::make_unique<LocalDriver>(network, rank);
    // One engine runs all ranks, so none can fall silent without the others.
    const CommunicatorOptions options{
        .session = {.epoch = epoch,
                    .timeout_s = timeout_s,
                    .liveness_timeout_s = std::nullopt,
                    .stall_s = stall_s,
                    .group = group},
        .report_folder = report_folder};
    all.push_back(std::make_shared<Communicator>(engine, std::move(driver), options));
  }
  for (const auto& communicator : all) communicator->join();
  for (const auto& communicator : all) {
    with_signals(Engine::now_s() + kJoinMost_s,
                 [&](double slice_s) { return communicator->await_join(slice_s); });
  }
  return all;
}

// Without the interpreter's lock, but while Python is asked. `join`: makes a communicator by an exchange and a way to wait.
template <class Join>
CommunicatorPtr join_by(const nb::callable& exchange, Join join) {
  const Exchange swap = [&](ConstBytes mine) {
    const nb::gil_scoped_acquire locked;
    const nb::object answer = exchange(nb::bytes(mine.data(), mine.size()));
    std::vector<std::vector<std::byte>> all;
    for (const nb::handle item : answer) {
      const auto blob = nb::cast<nb::bytes>(item);
      const auto* const first = reinterpret_cast<const std::byte*>(blob.c_str());
      all.emplace_back(first, first + blob.size());
    }
    return all;
  };
  const Waiting waiting = [](double deadline_s, const std::function<bool(double)>& attempt) {
    const nb::gil_scoped_acquire locked;
    return with_signals(deadline_s, attempt);
  };
  const Unlocked unlocked;
  return join(swap, waiting);
}

CommunicatorOptions options_of(double timeout_s, std::optional<double> liveness_timeout_s,
                               const std::string& report_folder, const std::string& group_name,
                               std::vector<Rank> parent_ranks, double stall_s) {
  return {.session = {.timeout_s = timeout_s,
                      .liveness_timeout_s = liveness_timeout_s,
                      .stall_s = stall_s,
                      .group = group_named(group_name, std::move(parent_ranks))},
          .report_folder = report_folder};
}

CommunicatorPtr make_ucx(Rank rank, Rank size, const nb::callable& exchange, double timeout_s,
                         std::optional<double> liveness_timeout_s, const std::optional<std::string>& interface,
                         const std::string& report_folder, bool checks, const std::string& group_name,
                         std::vector<Rank> parent_ranks, const std::optional<std::string>& devices, double stall_s) {
  CommunicatorOptions options =
      options_of(timeout_s, liveness_timeout_s, report_folder, group_name, std::move(parent_ranks), stall_s);
  if (!checks) {
    options.session.heartbeat_s = kNever_s;
    options.session.probe_s = kNever_s;
  }
  const UcxOptions ucx{.interface = interface.value_or(""), .devices = devices.value_or("")};
  return join_by(exchange, [&](const Exchange& swap, const Waiting& waiting) {
    return telegrad::ucx::join(rank, size, ucx, std::move(options), swap, waiting);
  });
}

// `driver`: a capsule of another extension module, which holds a driver until it is joined.
CommunicatorPtr make_over(const nb::capsule& driver, const nb::callable& exchange, double timeout_s,
                          std::optional<double> liveness_timeout_s, const std::string& report_folder,
                          const std::string& group_name, std::vector<Rank> parent_ranks, double stall_s) {
  auto& held = *static_cast<std::unique_ptr<AddressedDriver>*>(driver.data(kDriverCapsule));
  if (!held) throw nb::value_error("this driver is joined already: make another");
  return join_by(exchange, [&](const Exchange& swap, const Waiting& waiting) {
    return join(std::move(held),
                options_of(timeout_s, liveness_timeout_s, report_folder, group_name, std::move(parent_ranks), stall_s),
                swap, waiting);
  });
}

nb::dict counters_of(Communicator& self) {
  Communicator::Counters counters;
  {
    const Unlocked unlocked;
    counters = self.counters();
  }
  return as_dict(counters, counters.in_flight, counters.waiting_s, counters.refused);
}

// {"operations": [(operation, dtype, reduction, algorithm, root or None, count, bytes, sequence or None, submitted_s,
// begun_s or None, ended_s, failed)], "waits": [(operation, thread, begin_s, end_s)], "…_dropped": int}
nb::dict traced_of(const Communicator& self) {
  const Trace::Records records = self.traced();
  nb::list operations;
  for (const TracedOperation& one : records.operations) {
    const Call& call = one.call;
    operations.append(nb::make_tuple(
        name_of(call.operation), name_of(call.dtype), name_of(call.reduction), name_of(call.algorithm),
        call.root == kNoRank ? nb::none() : nb::cast(call.root), call.count, call.count * size_of(call.dtype),
        one.begun ? nb::cast(one.begun->sequence) : nb::none(), one.submitted_s,
        one.begun ? nb::cast(one.begun->when_s) : nb::none(), one.ended_s, one.failed));
  }
  nb::list waits;
  for (const TracedWait& one : records.waits) {
    waits.append(nb::make_tuple(name_of(one.call.operation), one.thread, one.begin_s, one.end_s));
  }
  nb::dict result;
  result["operations"] = operations;
  result["waits"] = waits;
  result["operations_dropped"] = records.operations_dropped;
  result["waits_dropped"] = records.waits_dropped;
  return result;
}

}  // namespace

void bind_communicator(nb::module_& module) {
  module.def("leave_threads_behind", &leave_threads_behind);
  module.def("set_purpose", [](std::uint32_t purpose) { return std::exchange(purpose_of_calls, purpose); }, nb::arg("purpose"));
  nb::class_<Gate>(module, "Gate")
      .def(
          "__init__",
          [](Gate* self, std::uintptr_t ready, std::uintptr_t done, std::uint32_t value, std::uintptr_t output,
             std::size_t output_bytes) {
            new (self) Gate{.ready = reinterpret_cast<std::uint32_t*>(ready),
                            .ready_value = value,
                            .done = reinterpret_cast<std::uint32_t*>(done),
                            .done_value = value,
                            .output = memory<std::byte>(output, output_bytes)};
          },
          nb::arg("ready"), nb::arg("done"), nb::arg("value"), nb::arg("output"), nb::arg("output_bytes"));

  nb::class_<StartedCall>(module, "Request")
      .def("wait", &StartedCall::wait, nb::arg("timeout_s") = nb::none())
      .def("done", [](const StartedCall& self) { return self.done(); })
      .def("span_s", &StartedCall::span_s)
      .def("source", &StartedCall::source)
      .def("sparse_result", &StartedCall::sparse_result)
      .def("topk_result", &StartedCall::sparse_result)
      .def("sparse_results", &StartedCall::sparse_result);  // of an operation that has one by rank

  nb::class_<CompletionQueue>(module, "CompletionQueue")
      .def(nb::init<>())
      .def("watch",
           [](CompletionQueue& self, const StartedCall& operation, std::uint64_t token) {
             operation.watch(self, token);
           })
      .def(
          "next",
          [](CompletionQueue& self, double timeout_s) { return self.next(std::chrono::duration<double>(timeout_s)); },
          nb::arg("timeout_s"), nb::call_guard<Unlocked>())
      .def("close", &CompletionQueue::close);

  nb::class_<Communicator> communicator(module, "Communicator");
  communicator.def_static("local", &make_local, nb::arg("size"), nb::arg("timeout_s"),
                          nb::arg("report_folder") = "", nb::arg("group") = "",
                          nb::arg("parent_ranks") = std::vector<Rank>{}, nb::arg("stall_s") = kNever_s)
      .def_static("ucx", &make_ucx, nb::arg("rank"), nb::arg("size"), nb::arg("exchange"), nb::arg("timeout_s"),
                  nb::arg("liveness_timeout_s").none(), nb::arg("interface").none(), nb::arg("report_folder") = "",
                  nb::arg("checks") = true, nb::arg("group") = "", nb::arg("parent_ranks") = std::vector<Rank>{},
                  nb::arg("devices") = nb::none(), nb::arg("stall_s") = kNever_s)
      .def_static("over", &make_over, nb::arg("driver"), nb::arg("exchange"), nb::arg("timeout_s"),
                  nb::arg("liveness_timeout_s").none(), nb::arg("report_folder") = "", nb::arg("group") = "",
                  nb::arg("parent_ranks") = std::vector<Rank>{}, nb::arg("stall_s") = kNever_s)
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("driver", &Communicator::driver_name)
      .def_prop_ro("shares_memory", &Communicator::shares_memory)
      .def_prop_ro("has_network_sums", [](const Communicator& self) { return self.allreduce_table().has_network_sums(); })
      .def_prop_ro("warning", &Communicator::warning)
      .def("abort", &Communicator::abort, nb::arg("reason"), nb::call_guard<Unlocked>())
      .def("hint_at_stalls", &Communicator::hint_at_stalls, nb::arg("at_once"), nb::arg("later"),
           nb::call_guard<Unlocked>())
      .def("part", &Communicator::part, nb::call_guard<Unlocked>())
      .def("close", &Communicator::close, nb::call_guard<Unlocked>())
      .def("counters", &counters_of)
      .def_prop_ro("epoch", &Communicator::epoch)
      .def("start_trace", &Communicator::start_trace, nb::arg("most"))
      .def("traced", &traced_of)
      .def("report", &Communicator::report, nb::call_guard<Unlocked>());
  bind_reductions(communicator);
  bind_moves(communicator);
  bind_point_to_point(communicator);

  module.def("set_engine_core", &Engine::set_core, nb::arg("core"));
  module.def("report_on_signal", &report_on_signal, nb::arg("signal"));
  module.def("ucx_version", &UcxDriver::version);
  module.def("join_remedy", [](const std::string& reason) { return join_remedy(reason); }, nb::arg("reason"));
}

}  // namespace telegrad::bindings
