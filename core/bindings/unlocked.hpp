#pragma once
// Without the interpreter's lock, as nb::gil_scoped_release, but safe in daemon threads: the interpreter ends a thread that
// asks for the lock once it is going down by unwinding its stack, which C++ takes for a reason to end the process.

#include "bindings/binding.hpp"

namespace telegrad::bindings {

/// While it lives, this thread does not hold the interpreter's lock. After leave_threads_behind() it never ends, in any
/// thread but the one that called that.
class Unlocked {
 public:
  Unlocked();
  ~Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

/// For the end of the interpreter, in its last thread, which holds the lock: returns once no thread is about to take it
/// again, a second later at most.
void leave_threads_behind();

}  // namespace telegrad::bindings
