#include "drivers/ucx/join_failure.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <system_error>
#include <vector>

extern char** environ;

namespace telegrad {
namespace {

struct Known {
  const char* text;
  const char* remedy;
};
constexpr const char* kMoreMemory =
    "make /dev/shm writable and large enough (mount -o remount,rw,size=1g /dev/shm; in a container docker run --shm-size=1g "
    "or --ipc=host), or set UCX_TLS=tcp,self on all ranks";
constexpr const char* kMoreFiles =
    "raise the limit of open files before the job (ulimit -n 65536; nofile in /etc/security/limits.conf; LimitNOFILE= of a "
    "service): a rank needs one for each other rank of its host, and two for each one of other hosts";
constexpr std::array kKnown{
    Known{"Destination is unreachable",
          "give every rank interface=<name> of a network by which the hosts reach each other (of two containers, their "
          "common one, or --network=host); unset UCX_NET_DEVICES, and UCX_TLS unless it has tcp"},
    Known{"Shared memory error", kMoreMemory},
    Known{"No such device",
          "name an interface of this host that is up, by interface= or UCX_NET_DEVICES, or neither; UCX_TLS, if set, must "
          "have tcp"},
    Known{"Input/output error",
          "look whether a firewall closes TCP ports between the hosts on these interfaces, and at the logs of the other "
          "ranks; another network: interface=<name>"},
    Known{"Out of memory",
          "give the process more memory (ulimit -v, ulimit -l, the container's limit) and /dev/shm more room (docker run "
          "--shm-size=1g)"},
    Known{"Too many open files", kMoreFiles},
    Known{"Invalid parameter", "unset the UCX_ variables that are set, and try again"},
};
constexpr off_t kMemoryBytes = 4400000;  // of a rank's segments, measured with UCX 1.22
constexpr std::size_t kFewFiles = 32;
constexpr std::size_t kInterfacesMost = 8;
constexpr std::size_t kValueMost = 100;

struct Link {
  std::string address;  // the first, IPv4 before IPv6
  bool is_up = false;
  bool is_bridge = false;
};

std::string text_of(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET) {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text, sizeof text);
  } else if (address->sa_family == AF_INET6) {
    ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text, sizeof text);
  }
  return text;
}

std::map<std::string, Link> links() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owned(first, &::freeifaddrs);
  std::map<std::string, Link> found;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* one = first; one != nullptr; one = one->ifa_next) {
      Link& link = found[one->ifa_name];
      link.is_up = (one->ifa_flags & IFF_UP) != 0 && (one->ifa_flags & IFF_RUNNING) != 0;
      if (one->ifa_addr != nullptr && one->ifa_addr->sa_family == family && link.address.empty()) {
        link.address = text_of(one->ifa_addr);
      }
    }
  }
  for (auto& [name, link] : found) {
    struct stat status {};
    link.is_bridge = ::stat(("/sys/class/net/" + name + "/bridge").c_str(), &status) == 0;
  }
  return found;
}

std::vector<std::string> parts_of(std::string_view list) {
  std::vector<std::string> parts;
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(','), list.size());
    if (end != 0) parts.emplace_back(list.substr(0, end));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return parts;
}

void append(std::string& list, std::size_t& count, const std::string& item) {
  if (++count <= kInterfacesMost) {
    list += (list.empty() ? "" : ", ") + item;
  } else if (count == kInterfacesMost + 1) {
    list += ", …";
  }
}

std::string interfaces_text(const UcxOptions& options) {
  if (options.only_memory()) return "no network is used, since all ranks share memory";
  const char* const variable = std::getenv("UCX_NET_DEVICES");
  const std::string asked = variable != nullptr ? variable : "";
  const std::string& chosen = !options.interface.empty() ? options.interface : (asked.empty() ? options.devices : asked);
  const bool by_name = !chosen.empty() && chosen != "all" && !chosen.starts_with('^');
  const std::vector<std::string> names = by_name ? parts_of(chosen) : std::vector<std::string>{};
  std::string tried, others;
  std::size_t tried_count = 0, others_count = 0;
  const std::map<std::string, Link> present = links();
  for (const std::string& name : names) {
    if (!present.contains(name)) append(tried, tried_count, name + " (no network interface of this host)");
  }
  for (const auto& [name, link] : present) {
    const bool named = std::ranges::find(names, name) != names.end();
    const bool usable = link.is_up && !link.address.empty();
    const char* const why = !link.is_up ? " (down)" : (link.address.empty() ? " (no address)" : "");
    const bool tries = by_name ? named : usable && !link.is_bridge;
    const std::string said = name + (link.address.empty() ? "" : " " + link.address);
    if (tries) {
      append(tried, tried_count, said + why);
    } else if (usable || named) {
      append(others, others_count, said + (link.is_bridge && !by_name ? " (a bridge)" : ""));
    }
  }
  return "interfaces tried: " + (tried.empty() ? "none" : tried) + (others.empty() ? "" : "; not tried: " + others);
}

std::string variables_text() {
  std::string found;
  for (char** one = environ; one != nullptr && *one != nullptr; ++one) {
    const std::string_view entry(*one);
    if (!entry.starts_with("UCX_")) continue;
    found += (found.empty() ? "" : ", ") + std::string(entry.substr(0, kValueMost)) + (entry.size() > kValueMost ? "…" : "");
  }
  return found.empty() ? "no UCX_ variable is set" : "set: " + found;
}

struct Descriptors {
  std::size_t open = 0;
  rlim_t most = RLIM_INFINITY;

  bool are_few() const { return most != RLIM_INFINITY && open + kFewFiles > most; }
  std::string text() const {
    return std::to_string(open) + " of " + (most == RLIM_INFINITY ? "unlimited" : std::to_string(most)) +
           " file descriptors are open";
  }
};

Descriptors descriptors() {
  Descriptors found;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) found.most = limit.rlim_cur;
  std::error_code none_left;
  const std::filesystem::directory_iterator entries("/proc/self/fd", none_left);
  if (none_left) {
    found.open = found.most == RLIM_INFINITY ? 0 : found.most;
  } else {
    found.open = static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
  }
  return found;
}

}  // namespace

std::string join_remedy(std::string_view reason) {
  const auto known = std::ranges::find_if(kKnown, [&](const Known& one) { return reason.find(one.text) != reason.npos; });
  if (known == kKnown.end()) return "";
  return descriptors().are_few() ? kMoreFiles : known->remedy;
}

std::string explained(const std::string& reason, const UcxOptions& options) {
  const std::string remedy = join_remedy(reason);
  if (remedy.empty() || reason.find(remedy) != reason.npos) return reason;
  return reason + " (" + variables_text() + "; " + interfaces_text(options) + "; " + descriptors().text() + "): " + remedy;
}

std::string why_no_memory_file() {
  const char* const folder = std::getenv("UCX_POSIX_DIR");
  std::string path = std::string(folder != nullptr ? folder : "/dev/shm");
  const std::string where = path;
  path += "/telegrad-XXXXXX";
  const int descriptor = ::mkostemp(path.data(), O_CLOEXEC);
  if (descriptor < 0) return where + ": " + std::strerror(errno);
  ::unlink(path.c_str());
  const int error = ::posix_fallocate(descriptor, 0, kMemoryBytes);
  ::close(descriptor);
  return error == 0 ? "" : where + ": " + std::strerror(error);
}

std::string lost_memory_text(const std::string& host, std::span<const Rank> ranks, const std::string& why) {
  std::string text = "no shared memory on host " + host + " for rank";
  for (const Rank rank : ranks) text += (rank == ranks.front() ? " " : ", ") + std::to_string(rank);
  return text + " (" + why +
         "): messages to the other ranks of the host go by TCP, which is several times slower: " + kMoreMemory;
}

}  // namespace telegrad
