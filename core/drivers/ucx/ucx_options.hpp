#pragma once
// What a program tells the ucx driver.

#include <string>

namespace telegrad {

struct UcxOptions {
  /// Network interfaces to use, separated by commas, such as "eth0"; empty: UCX chooses.
  std::string interface{};
  /// The same as a proposal: the environment's UCX_NET_DEVICES, or UCX's file of settings, goes first.
  std::string devices{};
  /// Strangers' TCP connections do not reach UCX: every rank has the job's key (AddressedDriver::guard_by).
  bool guards_connections = false;
};

}  // namespace telegrad
