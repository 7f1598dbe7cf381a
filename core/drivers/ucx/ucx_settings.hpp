#pragma once
// How UCX is configured here. It must not know of drivers.

#include <ucp/api/ucp.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "base/types.hpp"
#include "drivers/ucx/ucx_options.hpp"

namespace telegrad {

using UcxConfig = std::unique_ptr<ucp_config_t, decltype(&ucp_config_release)>;

/// Messages within a host that are read where they lie, unless the environment says otherwise; shorter ones go with their
/// announcement.
inline constexpr std::size_t kHostRendezvousLeast = std::size_t{128} << 10;

/// UCX's configuration with what telegrad needs, and with what is faster unless the environment says otherwise. Throws
/// TransportError.
UcxConfig configured(Rank rank, const UcxOptions& options);

/// The same for workers of control messages, which are short and rare: less memory.
void make_small(ucp_config_t* config);

/// Leaves UCX no transport through memory. False where there is no other left, or UCX does not take it.
bool leave_out_memory(ucp_config_t* config);

/// Whether memory may be moved to huge pages: unless TELEGRAD_HUGE_PAGES is 0, or the system has none for anybody.
bool wants_huge_pages();

/// A setting, such as "UCX_TLS", as UCX has it from wherever it reads its configuration; empty: it has none of that name.
std::string setting_of(const ucp_config_t* config, std::string_view name);

}  // namespace telegrad
