#include "bindings/device_fast_path.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>

#include "bindings/names.hpp"
#include "bindings/operation.hpp"
#include "bindings/torch_tensor.hpp"
#include "session/gate.hpp"
#include "session/reductions.hpp"

namespace telegrad::bindings {
namespace {

constexpr std::size_t kSmallest = 4096;
constexpr std::size_t kMostOutstanding = 256;  // then somebody looks for failures behind one that is long under way
constexpr std::uintptr_t kLegacy = 1;          // CU_STREAM_LEGACY: 0 may be another stream to the driver than to torch

std::size_t rounded(std::size_t bytes) { return std::max(kSmallest, std::bit_ceil(bytes)); }

}  // namespace

std::size_t DeviceFastPath::lend(const Slot& slot) {
  if (slot.bytes < kSmallest || !std::has_single_bit(slot.bytes)) throw nb::value_error("bytes must be a power of two");
  const std::size_t number = slots_.size();
  slots_.push_back(slot);
  by_bytes_[slot.bytes].push_back(number);
  return number;
}

bool DeviceFastPath::is_usable() {
  while (!outstanding_.empty() && outstanding_.front().first->done() && !outstanding_.front().first->failure()) {
    outstanding_.pop_front();
  }
  for (const RequestPtr& one : {last_, outstanding_.empty() ? nullptr : outstanding_.front().first}) {
    if (one != nullptr && one->done() && one->failure()) is_stopped_ = true;
  }
  return !is_stopped_ && outstanding_.size() < kMostOutstanding;
}

bool DeviceFastPath::is_free(const Slot& slot) const {
  return (slot.request == nullptr || (slot.request->done() && !slot.request->failure())) && driver_->passed(slot.event);
}

RequestPtr DeviceFastPath::all_reduce(nb::handle member, const std::shared_ptr<Communicator>& communicator, nb::handle x,
                                      nb::handle op, bool apart) {
  constexpr Reduction kSum = Reduction::sum;
  const Reduction* const reduction = op.is_valid() ? reduction_names().find(op) : &kSum;
  if (reduction == nullptr) return nullptr;
  const std::optional<HostBuffer> found = torch_buffer_on(device_, x);
  if (!found || found->nbytes == 0 || !has_reduction(found->dtype, *reduction)) {
    return nullptr;
  }
  auto stream = nb::cast<std::uintptr_t>(current_stream_(index_));
  // From here on until the slot is taken nothing of Python's runs. A stream that is captured is asked before all else, as
  // what is asked of its events would end that. The default one cannot be, and must not be asked while another one is.
  if (stream == 0) {
    stream = kLegacy;
  } else if (driver_->is_capturing(stream)) {
    return nullptr;
  }
  if (!is_usable() || (apart && !streams_)) return nullptr;
  const std::size_t bytes = found->nbytes;
  const auto same = by_bytes_.find(rounded(bytes));
  if (same == by_bytes_.end() || same->second.empty()) return nullptr;
  const std::size_t number = same->second.front();
  if (!is_free(slots_[number])) return nullptr;
  const Streams own = apart ? *streams_ : Streams{.inputs = stream, .results = stream};
  slots_[number].value += 1;
  const Slot used = slots_[number];  // another thread may lend slots while this one does not hold the lock
  const RequestPtr request = make_all_reduce(
      communicator->allreduce_table(), {.input = memory<const std::byte>(used.input, bytes),
                                        .output = memory<std::byte>(used.output, bytes),
                                        .dtype = found->dtype,
                                        .reduction = *reduction,
                                        .algorithm = Algorithm::automatic,
                                        .nodes = communicator->nodes(),
                                        .gated = true});
  request->set_gate({.ready = reinterpret_cast<std::uint32_t*>(used.ready),
                     .ready_value = used.value,
                     .done = reinterpret_cast<std::uint32_t*>(used.done),
                     .done_value = used.value,
                     .output = memory<std::byte>(used.output, bytes)});
  same->second.pop_front();
  slots_[number].lost = true;  // until it is known that nothing broke off
  {
    const Unlocked unlocked;
    if (apart) driver_->join(stream, own.inputs, used.event);
    driver_->stage(own.inputs, used.input, found->pointer, bytes, used.ready, used.value);
  }
  // The stream has it first: an operation whose gate nobody opens would hold up all ranks.
  try {
    slots_[number].request = last_ = request;
    outstanding_.emplace_back(request, number);
    communicator->submit(request, false);
    const Unlocked unlocked;
    if (apart) driver_->join(own.inputs, own.results, used.event);
    driver_->fetch(own.results, used.done, used.value, found->pointer, used.output, bytes, used.event);
  } catch (const std::exception& error) {
    member.attr("abort")(nb::str((std::string("all_reduce of device tensors broke off: ") + error.what()).c_str()));
    throw;
  }
  slots_[number].lost = false;
  if (!by_bytes_.empty()) by_bytes_[used.bytes].push_back(number);  // unless it was closed meanwhile
  return request;
}

void DeviceFastPath::close() {
  stop();
  by_bytes_.clear();
  streams_.reset();
}

std::vector<std::pair<RequestPtr, std::size_t>> DeviceFastPath::take_outstanding() {
  std::vector<std::pair<RequestPtr, std::size_t>> taken(outstanding_.begin(), outstanding_.end());
  outstanding_.clear();
  return taken;
}

void bind_device_fast_path(nb::module_& module) {
  nb::class_<StreamDriver>(module, "StreamDriver")
      .def(nb::init<const std::string&, std::uintptr_t>(), nb::arg("library"), nb::arg("context"));

  nb::class_<DeviceFastPath>(module, "DeviceFastPath")
      .def(nb::init<std::shared_ptr<StreamDriver>, nb::object, int, nb::object>(), nb::arg("driver"), nb::arg("device"),
           nb::arg("index"), nb::arg("current_stream"))
      .def(
          "lend",
          [](DeviceFastPath& self, std::size_t bytes, std::uintptr_t input, std::uintptr_t output, std::uintptr_t ready,
             std::uintptr_t done, std::uint32_t value, std::uintptr_t event) {
            return self.lend({.bytes = bytes,
                              .input = input,
                              .output = output,
                              .ready = ready,
                              .done = done,
                              .value = value,
                              .event = event});
          },
          nb::arg("bytes"), nb::arg("input"), nb::arg("output"), nb::arg("ready"), nb::arg("done"), nb::arg("value"),
          nb::arg("event"))
      // What a slot is like by now: the value of its words, its last operation or None, and whether a use broke off.
      .def(
          "slot",
          [](const DeviceFastPath& self, std::size_t number, const std::shared_ptr<Communicator>& communicator) {
            const DeviceFastPath::Slot& slot = self.slot(number);
            nb::object request = nb::none();
            if (slot.request != nullptr) request = nb::cast(operation_of(communicator, slot.request));
            return nb::make_tuple(slot.value, request, slot.lost);
          },
          nb::arg("number"), nb::arg("communicator"))
      .def("__len__", &DeviceFastPath::slots)
      .def("stop", &DeviceFastPath::stop)
      .def("close", &DeviceFastPath::close)
      .def(
          "all_reduce",
          [](DeviceFastPath& self, nb::handle member, const std::shared_ptr<Communicator>& communicator, nb::handle x,
             nb::handle op, bool apart) {
            const RequestPtr request = self.all_reduce(member, communicator, x, op, apart);
            return request == nullptr ? nb::none() : nb::cast(operation_of(communicator, request));
          },
          nb::arg("member"), nb::arg("communicator"), nb::arg("x"), nb::arg("op"), nb::arg("apart") = false)
      .def(
          "use",
          [](DeviceFastPath& self, std::uintptr_t inputs, std::uintptr_t results) {
            self.use({.inputs = inputs, .results = results});
          },
          nb::arg("inputs"), nb::arg("results"))
      .def("has_outstanding", &DeviceFastPath::has_outstanding)
      .def("take_outstanding", [](DeviceFastPath& self, const std::shared_ptr<Communicator>& communicator) {
        nb::list taken;
        for (auto& [request, number] : self.take_outstanding()) {
          taken.append(nb::make_tuple(nb::cast(operation_of(communicator, request)), number));
        }
        return taken;
      }, nb::arg("communicator"));
}

}  // namespace telegrad::bindings
