#pragma once
// What the mpi driver has under way with MPI, and what has come to it. For its own files only.

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/buffer.hpp"
#include "drivers/mpi/mpi_driver.hpp"

namespace telegrad {

struct MpiDriver::Transfer {
  enum class What : std::uint8_t { sends_message, sends_payload, reduces, receives_message, receives_payload, drops_payload };
  What what = What::sends_message;
  Rank peer = 0;
  Pending* pending = nullptr;  // of a payload that somebody waits for
  std::size_t length = 0;      // of that payload, or what is left to drop of one behind this piece
  int ticket = 0;              // of a payload that is dropped
  std::size_t pieces_left = 1;
  Buffer buffer{};  // what the driver itself sends or receives
  Buffer* values = nullptr;  // of a reduction

  bool receives() const { return what >= What::receives_message; }
  std::string failed(int code) const { return (receives() ? "receiving failed: " : "sending failed: ") + describe_mpi(code); }
};

struct MpiDriver::Incoming {
  Rank source = 0;
  bool live = false;
  bool announced = false;  // the payload is still at the sender
  int ticket = 0;
  std::size_t length = 0;
  Buffer message{};  // the payload is its end
};

}  // namespace telegrad
