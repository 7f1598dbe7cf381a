#pragma once
// Where reports of hanging operations go: one file per rank and communicator, complete whenever it can be seen.

#include <string>

namespace telegrad {

/// Writes `text` into `folder`/`name`, by another name first. The folder is made for this user alone if it does not
/// exist. Returns what to tell the user: where the report is, or why there is none. Never throws.
std::string write_report_file(const std::string& folder, const std::string& name, const std::string& text) noexcept;

}  // namespace telegrad
