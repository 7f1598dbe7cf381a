#include "drivers/ucx/ucx_settings.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

#include "drivers/ucx/transports.hpp"
#include "drivers/ucx/ucx_worker.hpp"

namespace telegrad {
namespace {

// Below the threshold a message goes with its announcement. A rendezvous costs a round trip, and on crowded cores two
// changes of process: within a host UCX's own threshold, about 8 KiB, made 16 to 128 KiB take up to twice as long over
// shared memory and four times over TCP. Between hosts its own is better: with 128k, 16 MiB over 1 Gbit/s took 4 % longer.
// Segments of TCP are as long as its receive buffers. A queue in shared memory has a buffer for each of its 256 places and
// some more: UCX would make 512, and write to each. Of the two kinds of shared memory it would set up both, and use one.
//
// UCX names a queue in shared memory by its process and descriptor, and an endpoint by its address in memory. A process
// that was frozen while the others went on in another communicator may answer a request of the old one there, and UCX
// would write to where the old endpoint was. Endpoints with indirect names are looked up.
struct Setting {
  const char* name;
  const char* value;
};
static_assert(kHostRendezvousLeast == std::size_t{128} << 10);  // as text below
constexpr std::array kSettings{Setting{"RNDV_THRESH", "intra:128k,inter:auto"}, Setting{"TCP_TX_SEG_SIZE", "64k"},
                               Setting{"POSIX_RX_BUFS_GROW", "288"}, Setting{"PROTO_INDIRECT_ID", "y"}};

constexpr const char* kAllDevices = "all";

// Unless the user knows better. A UCX that does not know the setting is slower, or reaches less, but works.
void propose(ucp_config_t* config, const char* name, const char* value) {
  if (std::getenv((std::string("UCX_") + name).c_str()) == nullptr) ucp_config_modify(config, name, value);
}

}  // namespace

UcxConfig configured(Rank rank, const UcxOptions& options) {
  ucp_config_t* config = nullptr;
  check_ucx(ucp_config_read(nullptr, nullptr, &config), rank, "ucp_config_read");
  UcxConfig owned(config, &ucp_config_release);
  check_ucx(ucp_config_modify(config, "KEEPALIVE_INTERVAL", "200ms"), rank, "ucp_config_modify(KEEPALIVE_INTERVAL)");
  for (const Setting& setting : kSettings) propose(config, setting.name, setting.value);
  propose(config, "TLS", options.only_memory() ? "^sysv,tcp" : "^sysv");
  if (options.only_memory()) return owned;
  std::string devices = setting_of(config, "UCX_NET_DEVICES");
  if (!options.interface.empty() || (!options.devices.empty() && devices == kAllDevices)) {
    devices = options.interface.empty() ? options.devices : options.interface;
    check_ucx(ucp_config_modify(config, "NET_DEVICES", devices.c_str()), rank,
              "ucp_config_modify(NET_DEVICES=" + devices + ")");
  }
  // Who names interfaces means them: UCX leaves bridges out, since those of containers have one address on all hosts.
  if (!devices.empty() && devices != kAllDevices && !devices.starts_with('^')) propose(config, "TCP_BRIDGE_ENABLE", "y");
  return owned;
}

void make_small(ucp_config_t* config) {
  propose(config, "POSIX_FIFO_SIZE", "64");
  propose(config, "POSIX_RX_BUFS_GROW", "72");
}

bool leave_out_memory(ucp_config_t* config) {
  const std::string transports = without_shared_memory(setting_of(config, "UCX_TLS"));
  return !transports.empty() && ucp_config_modify(config, "TLS", transports.c_str()) == UCS_OK;
}

bool wants_huge_pages() {
  const char* const wanted = std::getenv("TELEGRAD_HUGE_PAGES");
  if (wanted != nullptr && std::string_view(wanted) == "0") return false;
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string settings;
  // The kernel would do it nevertheless.
  return std::getline(file, settings) && settings.find("[never]") == std::string::npos;
}

std::string setting_of(const ucp_config_t* config, std::string_view name) {
  char* text = nullptr;
  std::size_t length = 0;
  std::FILE* const stream = ::open_memstream(&text, &length);
  if (stream == nullptr) return "";
  ucp_config_print(config, stream, nullptr, UCS_CONFIG_PRINT_CONFIG);
  std::fclose(stream);
  const std::unique_ptr<char, decltype(&std::free)> owned(text, &std::free);
  const std::string begin = std::string(name) + "=";
  std::string_view rest(text, length);
  while (!rest.empty()) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    if (line.starts_with(begin)) return std::string(line.substr(begin.size()));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
  }
  return "";
}

}  // namespace telegrad
