#pragma once
// What a program tells the ucx driver.

#include <string>

namespace telegrad {

struct UcxOptions {
  /// Network interfaces to use, separated by commas, such as "eth0"; empty: UCX chooses.
  std::string interface{};
  /// The same as a proposal: the environment's UCX_NET_DEVICES, or UCX's file of settings, goes first.
  std::string devices{};
};

}  // namespace telegrad
