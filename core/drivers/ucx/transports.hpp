#pragma once
// What UCX's list of transports (UCX_TLS) says.

#include <string>
#include <string_view>

namespace telegrad {

/// True if processes of one host may talk through memory: `list` is as in UCX_TLS, names separated by commas, or after a
/// ^ the names that are not allowed.
bool allows_shared_memory(std::string_view list);

/// The same list without memory; empty where nothing that reaches another process is left.
std::string without_shared_memory(std::string_view list);

}  // namespace telegrad
