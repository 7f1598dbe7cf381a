#pragma once
// How the library ends a process that cannot go on: with one line on stderr that says why. Nothing here allocates memory,
// which may have run out.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>

namespace telegrad {

/// Writes "telegrad: WHAT; ending the process" and aborts.
[[noreturn]] inline void end_process(const char* what) noexcept {
  char line[256];
  const int length = std::snprintf(line, sizeof line, "telegrad: %.200s; ending the process\n", what);
  if (length > 0) {
    // Where stderr is closed there is nobody to tell.
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line, std::min(static_cast<std::size_t>(length), sizeof line - 1));
  }
  std::abort();
}

/// The same for an exception that nobody can catch; `where`: what was being done.
[[noreturn]] inline void end_process(const char* where, const std::exception& thrown) noexcept {
  const bool memory = dynamic_cast<const std::bad_alloc*>(&thrown) != nullptr;
  char what[200];
  std::snprintf(what, sizeof what, "%.60s: %.120s", where, memory ? "out of memory" : thrown.what());
  end_process(what);
}

/// Runs `body` where an exception has nowhere to go (a thread's end, a destructor): it ends the process, which would end
/// then in any case, and without a line of ours.
template <class Body>
void or_end(const char* where, Body&& body) noexcept {
  try {
    body();
  } catch (const std::exception& thrown) {
    end_process(where, thrown);
  }
}

}  // namespace telegrad
