#include "progress/communicator.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>

#include "bindings/moves.hpp"
#include "bindings/point_to_point.hpp"
#include "bindings/reductions.hpp"
#include "drivers/local/local_driver.hpp"
#include "drivers/ucx/ucx_driver.hpp"
#include "progress/report_signal.hpp"

namespace telegrad::bindings {
namespace {

using CommunicatorPtr = std::shared_ptr<Communicator>;

constexpr double kJoinMost_s = 60.0;

// Of split(): its name in errors, and the parent's ranks that are in it, by rank; none without a name.
std::shared_ptr<const Group> group_named(const std::string& name, std::vector<Rank> parent_ranks) {
  return name.empty() ? nullptr : std::make_shared<const Group>(Group{name, std::move(parent_ranks)});
}

std::vector<CommunicatorPtr> make_local(Rank size, double timeout_s, const std::string& report_folder,
                                        const std::string& group_name, std::vector<Rank> parent_ranks) {
  const auto group = group_named(group_name, std::move(parent_ranks));
  const std::uint32_t epoch = std::random_device{}();
  const auto network = std::make_shared<LocalNetwork>(size);
  const auto engine = Engine::shared();
  std::vector<CommunicatorPtr> all;
  for (Rank rank = 0; rank < size; ++rank) {
    auto driver = std::make_unique<LocalDriver>(network, rank);
    // One engine runs all ranks, so none can fall silent without the others.
    const CommunicatorOptions options{
        .session = {.epoch = epoch, .timeout_s = timeout_s, .liveness_timeout_s = std::nullopt, .group = group},
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

CommunicatorPtr join_ucx(Rank rank, Rank size, const nb::callable& exchange, double timeout_s,
                         std::optional<double> liveness_timeout_s, const std::optional<std::string>& interface,
                         const std::string& report_folder, bool checks, const std::shared_ptr<const Group>& group) {
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
  CommunicatorOptions options{
      .session = {.epoch = epoch, .timeout_s = timeout_s, .liveness_timeout_s = liveness_timeout_s, .group = group},
      .report_folder = report_folder};
  if (!checks) {
    constexpr double kNever_s = std::numeric_limits<double>::infinity();
    options.session.heartbeat_s = kNever_s;
    options.session.probe_s = kNever_s;
  }
  auto communicator = std::make_shared<Communicator>(Engine::shared(), std::move(driver), options);
  communicator->join();
  const double join_s = std::min(timeout_s, kJoinMost_s);
  try {
    if (!with_signals(Engine::now_s() + join_s,
                      [&](double slice_s) { return communicator->await_join(slice_s); })) {
      communicator->give_up_join(join_s);
    }
  } catch (...) {  // Ctrl-C too: the others need not wait, and closing takes a moment
    const nb::gil_scoped_release unlocked;
    communicator->abort("rank " + std::to_string(rank) + " did not join");
    communicator->close();
    throw;
  }
  return communicator;
}

CommunicatorPtr make_ucx(Rank rank, Rank size, const nb::callable& exchange, double timeout_s,
                         std::optional<double> liveness_timeout_s, const std::optional<std::string>& interface,
                         const std::string& report_folder, bool checks, const std::string& group_name,
                         std::vector<Rank> parent_ranks) {
  const auto group = group_named(group_name, std::move(parent_ranks));
  try {
    return join_ucx(rank, size, exchange, timeout_s, liveness_timeout_s, interface, report_folder, checks, group);
  } catch (const TransportError& error) {  // also of the driver, which knows of no groups
    Failure failure = error.failure();
    failure.group = group;
    throw TransportError(std::move(failure));
  }
}

nb::dict counters_of(Communicator& self) {
  Communicator::Counters counters;
  {
    const nb::gil_scoped_release unlocked;
    counters = self.counters();
  }
  return as_dict(counters, counters.in_flight, counters.waiting_s);
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
  nb::class_<Operation>(module, "Request")
      .def("wait", &Operation::wait, nb::arg("timeout_s") = nb::none())
      .def("done", [](const Operation& self) { return self.done(); })
      .def("span_s", &Operation::span_s)
      .def("source", &Operation::source)
      .def("sparse_result", &Operation::sparse_result)
      .def("topk_result", &Operation::sparse_result)
      .def("sparse_results", &Operation::sparse_result);  // of an operation that has one by rank

  nb::class_<CompletionQueue>(module, "CompletionQueue")
      .def(nb::init<>())
      .def("watch",
           [](CompletionQueue& self, const Operation& operation, std::uint64_t token) {
             operation.watch(self, token);
           })
      .def(
          "next",
          [](CompletionQueue& self, double timeout_s) { return self.next(std::chrono::duration<double>(timeout_s)); },
          nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>())
      .def("close", &CompletionQueue::close);

  nb::class_<Communicator> communicator(module, "Communicator");
  communicator.def_static("local", &make_local, nb::arg("size"), nb::arg("timeout_s"),
                          nb::arg("report_folder") = "", nb::arg("group") = "",
                          nb::arg("parent_ranks") = std::vector<Rank>{})
      .def_static("ucx", &make_ucx, nb::arg("rank"), nb::arg("size"), nb::arg("exchange"), nb::arg("timeout_s"),
                  nb::arg("liveness_timeout_s").none(), nb::arg("interface").none(), nb::arg("report_folder") = "",
                  nb::arg("checks") = true, nb::arg("group") = "", nb::arg("parent_ranks") = std::vector<Rank>{})
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("driver", &Communicator::driver_name)
      .def_prop_ro("shares_memory", &Communicator::shares_memory)
      .def("abort", &Communicator::abort, nb::arg("reason"), nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Communicator::close, nb::call_guard<nb::gil_scoped_release>())
      .def("counters", &counters_of)
      .def_prop_ro("epoch", &Communicator::epoch)
      .def("start_trace", &Communicator::start_trace, nb::arg("most"))
      .def("traced", &traced_of)
      .def("report", &Communicator::report, nb::call_guard<nb::gil_scoped_release>());
  bind_reductions(communicator);
  bind_moves(communicator);
  bind_point_to_point(communicator);

  module.def("set_engine_core", &Engine::set_core, nb::arg("core"));
  module.def("report_on_signal", &report_on_signal, nb::arg("signal"));
  module.def("ucx_version", &UcxDriver::version);
}

}  // namespace telegrad::bindings
