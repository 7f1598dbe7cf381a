#pragma once
// The few functions of CUDA's driver by which an operation goes into a stream, without its headers: found in its library
// when a program first gives a tensor of a GPU.

#include <cstddef>
#include <cstdint>
#include <string>

namespace telegrad::bindings {

/// Streams, events and addresses on the device are numbers as the driver has them. What fails throws std::runtime_error.
class StreamDriver {
 public:
  /// `context`: the device's, which all calls are made in. Throws std::runtime_error where the library lacks what it needs.
  StreamDriver(const std::string& library, std::uintptr_t context);

  /// Copies to pinned memory; then writes the word at `ready` there.
  void stage(std::uintptr_t stream, std::uintptr_t host, std::uintptr_t device, std::size_t bytes, std::uintptr_t ready,
             std::uint32_t value) const;
  /// Waits until the word at `done` in pinned memory is `value` or more; copies from there; then comes `event`.
  void fetch(std::uintptr_t stream, std::uintptr_t done, std::uint32_t value, std::uintptr_t device, std::uintptr_t host,
             std::size_t bytes, std::uintptr_t event) const;
  /// What is put into `second` from now on waits for what is in `first`; `event` is used for that, and free again.
  void join(std::uintptr_t first, std::uintptr_t second, std::uintptr_t event) const;
  bool passed(std::uintptr_t event) const;
  bool is_capturing(std::uintptr_t stream) const;

 private:
  using Handle = void*;
  using Status = int;
  class Entered;

  void check(const char* function, Status status) const;

  Handle context_;
  Status (*push_)(Handle) = nullptr;
  Status (*pop_)(Handle*) = nullptr;
  Status (*copy_to_host_)(void*, std::uint64_t, std::size_t, Handle) = nullptr;
  Status (*copy_to_device_)(std::uint64_t, const void*, std::size_t, Handle) = nullptr;
  Status (*write_)(Handle, std::uint64_t, std::uint32_t, unsigned) = nullptr;
  Status (*wait_)(Handle, std::uint64_t, std::uint32_t, unsigned) = nullptr;
  Status (*record_)(Handle, Handle) = nullptr;
  Status (*wait_for_)(Handle, Handle, unsigned) = nullptr;
  Status (*query_)(Handle) = nullptr;
  Status (*capturing_)(Handle, int*) = nullptr;
  Status (*name_)(Status, const char**) = nullptr;
};

}  // namespace telegrad::bindings
