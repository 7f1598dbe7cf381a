#include "progress/report_signal.hpp"

#include <sched.h>
#include <signal.h>

#include <atomic>
#include <cerrno>
#include <mutex>

#include "progress/engine.hpp"

namespace telegrad {
namespace {

std::atomic<Engine*> reporting = nullptr;
std::atomic<int> handlers_running = 0;
struct sigaction before{};
int handled = 0;

void handle(int signal, siginfo_t* info, void* context) {
  const int saved = errno;
  ++handlers_running;
  if (Engine* const engine = reporting; engine != nullptr && !engine->forked()) engine->ask_for_reports();
  --handlers_running;
  errno = saved;
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    if (before.sa_sigaction != nullptr) before.sa_sigaction(signal, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(signal);
  }
}

}  // namespace

void report_on_signal(int signal) {
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  if (handled == signal) return;
  if (handled != 0) {
    ::sigaction(handled, &before, nullptr);
    handled = 0;
  }
  struct sigaction action {};
  action.sa_sigaction = &handle;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  if (::sigaction(signal, nullptr, &before) == 0 && ::sigaction(signal, &action, nullptr) == 0) handled = signal;
}

void set_reporting_engine(Engine* engine) { reporting = engine; }

void forget_reporting_engine(Engine* engine) {
  Engine* expected = engine;
  reporting.compare_exchange_strong(expected, nullptr);
  while (handlers_running > 0) ::sched_yield();
}

}  // namespace telegrad
