#pragma once
// Which process a rank is, so that errors can name its host, and so that ranks of one machine hear of each other's
// death from the kernel: at once, and also where a forked child keeps the dead process's connections open.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace telegrad {

struct ProcessIdentity {
  std::uint64_t machine = 0;        // of this boot; equal on one machine only
  std::uint64_t pid_namespace = 0;  // process ids mean something within one
  std::uint64_t ipc_namespace = 0;  // shared memory reaches no further
  std::uint64_t start_ticks = 0;    // since boot: tells a process from a later one with the same id
  std::uint32_t pid = 0;
  std::string host;

  static ProcessIdentity of_this_process();

  /// Messages between the two may go through memory, if both allow it.
  bool shares_memory_with(const ProcessIdentity& other) const {
    return machine == other.machine && pid_namespace == other.pid_namespace && ipc_namespace == other.ipc_namespace;
  }

  void append_to(std::vector<std::byte>& bytes) const;
  /// Reads what append_to() wrote and removes it from `bytes`; nullopt if that is not there.
  static std::optional<ProcessIdentity> take_from(std::span<const std::byte>& bytes);

  struct Watch {
    int descriptor = -1;  // becomes readable when the process ends; -1: there is none, or it cannot be watched
    bool has_ended = false;
  };
  Watch watch_from(const ProcessIdentity& self) const;
  /// Whether watch_from() is possible, where this process may open a descriptor more: it is known, and the kernel can.
  bool can_be_watched_from(const ProcessIdentity& self) const;
};

}  // namespace telegrad
