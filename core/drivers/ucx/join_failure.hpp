#pragma once
// What UCX's failures in joining mean: it says "Destination is unreachable" and no more, whatever the cause. It must not know
// of drivers.

#include <span>
#include <string>
#include <string_view>

#include "base/types.hpp"
#include "drivers/ucx/ucx_options.hpp"

namespace telegrad {

/// What to do where joining failed with a text that has one of UCX's; empty: it has none that is known.
std::string join_remedy(std::string_view reason);

/// `reason`; where join_remedy() knows it, followed by what may be the cause here (the environment's UCX variables, the
/// interfaces tried and not tried, the descriptors left), and by the remedy.
std::string explained(const std::string& reason, const UcxOptions& options);

/// Why a rank's segments do not fit into UCX's folder for shared memory; empty: they do.
std::string why_no_memory_file();

/// That `ranks` of `host` do without shared memory, because of `why`, what it costs, and the remedy.
std::string lost_memory_text(const std::string& host, std::span<const Rank> ranks, const std::string& why);

}  // namespace telegrad
