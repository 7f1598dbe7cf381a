#include "drivers/processes/control_wire.hpp"

#include <cstring>

#include "base/check.hpp"

namespace telegrad {
namespace {

bool is_known(std::uint8_t value, std::uint8_t last) { return value >= 1 && value <= last; }

}  // namespace

ControlHeader header_of(const Control& control) {
  TELEGRAD_CHECK(control.calls.size() <= Control::kCallsMost && control.reason.size() <= Control::kReasonMost);
  return {.kind = static_cast<std::uint8_t>(control.kind),
          .failure = static_cast<std::uint8_t>(control.failure),
          .calls = static_cast<std::uint8_t>(control.calls.size()),
          .culprit_speaks = control.culprit_speaks,
          .source = control.source,
          .origin = control.origin,
          .culprit = control.culprit,
          .epoch = control.epoch,
          .wire_version = control.wire_version,
          .sequence = control.sequence,
          .called = control.called,
          .first_call = control.first_call,
          .messages = control.messages,
          .endianness = control.endianness,
          .point_to_point = control.point_to_point};
}

std::string payload_of(const Control& control) {
  std::string payload(reinterpret_cast<const char*>(control.calls.data()), control.calls.size() * sizeof(Call));
  return payload += control.reason;
}

std::optional<Control> decode_control(ConstBytes header, ConstBytes payload) {
  ControlHeader wire;
  if (header.size() != sizeof wire) return std::nullopt;
  std::memcpy(&wire, header.data(), sizeof wire);
  const std::size_t calls_bytes = wire.calls * sizeof(Call);
  if (wire.calls > Control::kCallsMost || payload.size() < calls_bytes ||
      payload.size() - calls_bytes > Control::kReasonMost ||
      !is_known(wire.kind, static_cast<std::uint8_t>(ControlKind::call)) ||
      !is_known(wire.failure, static_cast<std::uint8_t>(FailureKind::mismatched_call)) || wire.culprit_speaks > 1 ||
      wire.point_to_point > 1) {
    return std::nullopt;
  }
  Control control{.kind = static_cast<ControlKind>(wire.kind),
                  .failure = static_cast<FailureKind>(wire.failure),
                  .source = wire.source,
                  .origin = wire.origin,
                  .culprit = wire.culprit,
                  .culprit_speaks = wire.culprit_speaks == 1,
                  .point_to_point = wire.point_to_point == 1,
                  .epoch = wire.epoch,
                  .wire_version = wire.wire_version,
                  .sequence = wire.sequence,
                  .called = wire.called,
                  .first_call = wire.first_call,
                  .messages = wire.messages,
                  .endianness = wire.endianness};
  control.calls.resize(wire.calls);
  if (calls_bytes != 0) std::memcpy(control.calls.data(), payload.data(), calls_bytes);
  const auto reason = payload.subspan(calls_bytes);
  control.reason.assign(reinterpret_cast<const char*>(reason.data()), reason.size());
  return control;
}

}  // namespace telegrad
