#pragma once
// A signal by which a person asks a running job where it hangs. It works whatever the program's own threads are stuck
// in: the engine's thread writes the reports.

namespace telegrad {

class Engine;

/// From now on `signal` makes the engine of this process write reports; then it does what it did before, unless that
/// was to end the process. A second call for the same signal does nothing.
void report_on_signal(int signal);

/// Which engine writes them; null: none.
void set_reporting_engine(Engine* engine);
/// `engine` goes: no handler uses it after this has returned.
void forget_reporting_engine(Engine* engine);

}  // namespace telegrad
