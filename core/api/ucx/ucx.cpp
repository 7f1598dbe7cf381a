#include <net/if.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>

// The library's own headers first: once telegrad.hpp is read, its names stand beside theirs.
#include "api/joined.hpp"
#include "joining/ucx.hpp"

#include "telegrad/ucx.hpp"

namespace telegrad::ucx {
namespace {

// UCX would say of a name that does not exist, after all addresses have gone round, that nothing can be reached.
void check_interface(const std::string& interface) {
  if (interface.empty()) return;
  const std::unique_ptr<struct if_nameindex, decltype(&if_freenameindex)> present(::if_nameindex(), &if_freenameindex);
  std::string names;
  for (const auto* one = present.get(); one != nullptr && one->if_name != nullptr; ++one) {
    if (interface == one->if_name) return;
    names += std::string(names.empty() ? "" : ", ") + one->if_name;
  }
  throw std::invalid_argument("interface=" + interface + " does not exist on this machine: use one of " + names);
}

// UCX has threads and connections that a forked child only seems to have: peers would take it for frozen.
void check_not_forked() {
  static std::atomic<pid_t> joins_in = 0;
  pid_t first = 0;
  if (joins_in.compare_exchange_strong(first, ::getpid()) || first == ::getpid()) return;
  throw std::invalid_argument(
      "this process was forked from one that had joined over UCX, which works in that one only: fork before joining, or "
      "start programs of their own (exec)");
}

}  // namespace

api::Communicator join(Rank rank, Rank size, const Exchange& exchange, const api::Options& options,
                       const std::string& interface) {
  api::detail::check(options);
  api::detail::check_size(size);
  api::detail::check_rank("rank", rank, size);
  check_interface(interface);
  if (!exchange) throw std::invalid_argument("exchange is empty: give what brings all ranks' addresses together");
  check_not_forked();
  return api::detail::translated([&] {
    auto joined = std::make_shared<api::detail::Joined>();
    joined->options = options;
    joined->connect = [interface](Rank own, Rank all, CommunicatorOptions how, const telegrad::Exchange& swap) {
      return join(own, all, UcxOptions{.interface = interface}, std::move(how), swap);
    };
    joined->core = joined->connect(rank, size, api::detail::own_options(options), [&](ConstBytes mine) {
      return exchange(std::vector<std::byte>(mine.begin(), mine.end()));
    });
    if (const std::string& warning = joined->core->warning(); !warning.empty()) {
      std::fprintf(stderr, "telegrad: %s\n", warning.c_str());
    }
    return api::Communicator(std::move(joined));
  });
}

}  // namespace telegrad::ucx
