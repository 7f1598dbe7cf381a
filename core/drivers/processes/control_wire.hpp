#pragma once
// A control message as bytes: a header of fixed size, then its calls, then its reason. It must not know which network carries it.

#include <cstdint>
#include <optional>
#include <string>

#include "base/types.hpp"
#include "transport/driver.hpp"

namespace telegrad {

struct ControlHeader {
  std::uint8_t kind = 0;
  std::uint8_t failure = 0;
  std::uint8_t calls = 0;
  std::uint8_t culprit_speaks = 0;
  std::uint32_t source = 0;
  std::uint32_t origin = 0;
  std::uint32_t culprit = 0;
  std::uint32_t epoch = 0;
  std::uint32_t wire_version = 0;
  std::uint32_t sequence = 0;
  std::uint32_t called = 0;
  std::uint32_t first_call = 0;
  std::uint32_t messages = 0;
  std::uint32_t endianness = 0;
  std::uint32_t point_to_point = 0;
};
static_assert(sizeof(ControlHeader) == 48);

ControlHeader header_of(const Control& control);
std::string payload_of(const Control& control);
/// nullopt: no telegrad of this version has sent these bytes.
std::optional<Control> decode_control(ConstBytes header, ConstBytes payload);

}  // namespace telegrad
