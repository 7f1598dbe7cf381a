#pragma once
// The signal by which a thread is taken out of a call that never returns (drivers/mpi/mpi_calls.hpp). Threads that block
// signals leave this one open.

#include <signal.h>

namespace telegrad {

/// Late among the real-time signals, of which libraries take the first.
inline int leave_signal() { return SIGRTMAX - 3; }

}  // namespace telegrad
