#pragma once
// What a program tells the ucx driver.

#include <string>

namespace telegrad {

constexpr const char* kMemoryDevice = "memory";  // as UCX calls it

struct UcxOptions {
  /// Network interfaces to use, separated by commas, such as "eth0"; empty: UCX chooses.
  std::string interface{};
  /// The same as a proposal: the environment's UCX_NET_DEVICES, or UCX's file of settings, goes first. kMemoryDevice, on
  /// all ranks: they share memory and the kernel tells them of each other's end, so that no network is opened.
  std::string devices{};
  /// Strangers' TCP connections do not reach UCX: every rank has the job's key (AddressedDriver::guard_by).
  bool guards_connections = false;

  bool only_memory() const { return devices == kMemoryDevice; }
};

/// What UcxDriver::connect() throws on all ranks alike where a rank has no shared memory after all: without it,
/// UcxOptions::only_memory() reaches nobody.
struct MemoryMissing {};

}  // namespace telegrad
