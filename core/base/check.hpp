#pragma once
// Invariants of telegrad's own code. Bad input and a failing network are never CHECKed: they get an
// exception (misuse) or a Failure (world). A CHECK that fires is a bug here, so it stops the process.

#include <cstdio>
#include <cstdlib>

namespace telegrad {

[[noreturn]] inline void check_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "telegrad: invariant broken: %s (%s:%d); please report this as a bug\n", condition, file, line);
  std::abort();
}

}  // namespace telegrad

#define TELEGRAD_CHECK(condition) \
  ((condition) ? static_cast<void>(0) : ::telegrad::check_failed(#condition, __FILE__, __LINE__))
