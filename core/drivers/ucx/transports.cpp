#include "drivers/ucx/transports.hpp"

#include <algorithm>
#include <array>

namespace telegrad {
namespace {

constexpr std::array<std::string_view, 6> kMemory{"sm", "shm", "mm", "posix", "sysv", "xpmem"};

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

}  // namespace telegrad
