#include "drivers/ucx/ucx_settings.hpp"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

#include "drivers/ucx/ucx_worker.hpp"

namespace telegrad {
namespace {

// Below the threshold a message goes with its announcement. A rendezvous costs a round trip, and on crowded cores two
// changes of process: within a host UCX's own threshold, about 8 KiB, made 16 to 128 KiB take up to twice as long over
// shared memory and four times over TCP. Between hosts its own is better: with 128k, 16 MiB over 1 Gbit/s took 4 % longer.
// Segments of TCP are as long as its receive buffers.
struct Setting {
  const char* name;
  const char* value;
};
static_assert(kHostRendezvousLeast == std::size_t{128} << 10);  // as text below
constexpr std::array kSettings{Setting{"RNDV_THRESH", "intra:128k,inter:auto"}, Setting{"TCP_TX_SEG_SIZE", "64k"}};

}  // namespace

UcxConfig configured(Rank rank, const std::string& interface) {
  ucp_config_t* config = nullptr;
  check_ucx(ucp_config_read(nullptr, nullptr, &config), rank, "ucp_config_read");
  UcxConfig owned(config, &ucp_config_release);
  check_ucx(ucp_config_modify(config, "KEEPALIVE_INTERVAL", "200ms"), rank, "ucp_config_modify(KEEPALIVE_INTERVAL)");
  for (const Setting& setting : kSettings) {
    if (std::getenv((std::string("UCX_") + setting.name).c_str()) != nullptr) continue;  // the user knows better
    // A UCX that does not know one is slower, but works.
    ucp_config_modify(config, setting.name, setting.value);
  }
  if (!interface.empty()) {
    check_ucx(ucp_config_modify(config, "NET_DEVICES", interface.c_str()), rank,
              "ucp_config_modify(NET_DEVICES=" + interface + ")");
  }
  return owned;
}

bool wants_huge_pages() {
  const char* const wanted = std::getenv("TELEGRAD_HUGE_PAGES");
  if (wanted != nullptr && std::string_view(wanted) == "0") return false;
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string settings;
  // The kernel would do it nevertheless.
  return std::getline(file, settings) && settings.find("[never]") == std::string::npos;
}

std::string transports_of(const ucp_config_t* config) {
  char* text = nullptr;
  std::size_t length = 0;
  std::FILE* const stream = ::open_memstream(&text, &length);
  if (stream == nullptr) return "";
  ucp_config_print(config, stream, nullptr, UCS_CONFIG_PRINT_CONFIG);
  std::fclose(stream);
  const std::unique_ptr<char, decltype(&std::free)> owned(text, &std::free);
  std::string_view rest(text, length);
  constexpr std::string_view kName = "UCX_TLS=";
  const std::size_t begin = rest.find(kName);
  if (begin == std::string_view::npos) return "";
  rest.remove_prefix(begin + kName.size());
  return std::string(rest.substr(0, rest.find('\n')));
}

}  // namespace telegrad
