#include "drivers/processes/process_identity.hpp"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>

namespace telegrad {
namespace {

constexpr std::size_t kHostMost = 255;

struct Fixed {
  std::uint64_t machine;
  std::uint64_t pid_namespace;
  std::uint64_t ipc_namespace;
  std::uint64_t start_ticks;
  std::uint32_t pid;
  std::uint32_t host_length;
};

// The 22nd field of /proc/PID/stat; the second is a name in parentheses that may hold anything. 0: not to be had.
std::uint64_t start_ticks_of(std::uint32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const auto end_of_name = line.rfind(')');
  if (end_of_name == std::string::npos) return 0;
  std::istringstream rest(line.substr(end_of_name + 1));
  std::string field;
  for (int number = 3; number <= 22; ++number) rest >> field;
  return std::strtoull(field.c_str(), nullptr, 10);
}

// Of this process, of that kind; 0: not to be had.
std::uint64_t namespace_of(const char* kind) {
  struct stat status {};
  return ::stat((std::string("/proc/self/ns/") + kind).c_str(), &status) == 0 ? status.st_ino : 0;
}

}  // namespace

ProcessIdentity ProcessIdentity::of_this_process() {
  ProcessIdentity self;
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id") >> std::ws, boot);
  self.machine = boot.empty() ? 0 : std::hash<std::string>{}(boot);
  self.pid_namespace = namespace_of("pid");
  self.ipc_namespace = namespace_of("ipc");
  self.pid = static_cast<std::uint32_t>(::getpid());
  self.start_ticks = start_ticks_of(self.pid);
  std::array<char, kHostMost + 1> name{};
  if (::gethostname(name.data(), kHostMost) == 0) self.host = name.data();
  return self;
}

void ProcessIdentity::append_to(std::vector<std::byte>& bytes) const {
  const Fixed fixed{machine, pid_namespace, ipc_namespace, start_ticks, pid, static_cast<std::uint32_t>(host.size())};
  const auto* const first = reinterpret_cast<const std::byte*>(&fixed);
  bytes.insert(bytes.end(), first, first + sizeof fixed);
  const auto* const name = reinterpret_cast<const std::byte*>(host.data());
  bytes.insert(bytes.end(), name, name + host.size());
}

std::optional<ProcessIdentity> ProcessIdentity::take_from(std::span<const std::byte>& bytes) {
  Fixed fixed;
  if (bytes.size() < sizeof fixed) return std::nullopt;
  std::memcpy(&fixed, bytes.data(), sizeof fixed);
  const auto rest = bytes.subspan(sizeof fixed);
  if (fixed.host_length > kHostMost || rest.size() < fixed.host_length) return std::nullopt;
  ProcessIdentity identity{fixed.machine,     fixed.pid_namespace, fixed.ipc_namespace,
                           fixed.start_ticks, fixed.pid,           {}};
  identity.host.assign(reinterpret_cast<const char*>(rest.data()), fixed.host_length);
  // It goes into messages for people.
  std::ranges::replace_if(identity.host, [](char c) { return c < 0x21 || c > 0x7e; }, '?');
  bytes = rest.subspan(fixed.host_length);
  return identity;
}

bool ProcessIdentity::can_be_watched_from(const ProcessIdentity& self) const {
  const bool known = machine != 0 && pid_namespace != 0 && start_ticks != 0;
  if (!known || machine != self.machine || pid_namespace != self.pid_namespace || pid == self.pid) return false;
#ifdef SYS_pidfd_open
  static const bool has_kernel = [] {
    const int descriptor = static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0));
    const bool refused = descriptor < 0 && errno != EMFILE && errno != ENFILE;
    if (descriptor >= 0) ::close(descriptor);
    return !refused;
  }();
  return has_kernel;
#else
  return false;
#endif
}

ProcessIdentity::Watch ProcessIdentity::watch_from(const ProcessIdentity& self) const {
  if (!can_be_watched_from(self)) return {};
#ifdef SYS_pidfd_open
  const int descriptor = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));  // close-on-exec by itself
  if (descriptor < 0) return {.has_ended = errno == ESRCH};
  const std::uint64_t started = start_ticks_of(pid);
  if (started == start_ticks || started == 0) return {.descriptor = descriptor};  // 0: it may not be looked at
  ::close(descriptor);
  return {.has_ended = true};  // the number is another process's by now
#else
  return {};
#endif
}

}  // namespace telegrad
