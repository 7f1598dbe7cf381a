#include "drivers/ucx/transports.hpp"

#include <algorithm>
#include <array>

namespace telegrad {
namespace {

constexpr std::array<std::string_view, 6> kMemory{"sm", "shm", "mm", "posix", "sysv", "xpmem"};
// With them goes what only speeds them up, or reaches this process alone.
constexpr std::array<std::string_view, 3> kNoNetwork{"cma", "knem", "self"};

}  // namespace

bool allows_shared_memory(std::string_view list) {
  const bool excludes = list.starts_with('^');
  if (excludes) list.remove_prefix(1);
  bool all = false;
  bool whole = false;  // a name that stands for all ways through memory
  bool some = false;
  while (true) {
    const std::size_t end = list.find(',');
    std::string_view name = list.substr(0, end);
    if (name.starts_with('\\')) name.remove_prefix(1);  // exactly this one
    all = all || name == "all";
    whole = whole || name == "sm" || name == "shm";
    some = some || std::ranges::find(kMemory, name) != kMemory.end();
    if (end == std::string_view::npos) break;
    list.remove_prefix(end + 1);
  }
  return excludes ? !(all || whole) : (all || some);
}

std::string without_shared_memory(std::string_view list) {
  if (list.starts_with('^')) return std::string(list) + ",sm";
  std::string kept;
  bool reaches_others = false;
  while (true) {
    const std::size_t end = list.find(',');
    const std::string_view written = list.substr(0, end);
    const std::string_view name = written.starts_with('\\') ? written.substr(1) : written;
    if (name == "all") return "^sm";
    if (std::ranges::find(kMemory, name) == kMemory.end()) {
      if (!name.empty() && !kept.empty()) kept += ',';
      kept += written;
      reaches_others = reaches_others || (!name.empty() && std::ranges::find(kNoNetwork, name) == kNoNetwork.end());
    }
    if (end == std::string_view::npos) break;
    list.remove_prefix(end + 1);
  }
  return reaches_others ? kept : "";
}

}  // namespace telegrad
