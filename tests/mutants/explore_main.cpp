// explore [--first-seed N] [--seeds N] [--ranks A..B] [--only TROUBLE] [--stop] [--replay SEED]: the explorer without
// Python, and what planted bugs are linked with. Prints JSON; its status is 1 if anything was found. With --stop it ends
// at the first finding; a crash, or a seed that takes longer than a minute of processor time, is one too.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>

#include <sys/time.h>
#include <unistd.h>

#include "simulation/explorer/exploration.hpp"

namespace {

using telegrad::Rank;
using telegrad::explorer::ExploreOptions;

constexpr time_t kSeedMost_s = 60;  // a seed takes some milliseconds

volatile sig_atomic_t caught = 0;
std::uint64_t playing = 0;

// Not async-signal-safe, strictly speaking; the process has nothing to lose.
void tell_seed(int signal) {
  if (caught != 0) _exit(3);
  caught = signal;
  char text[96];
  const char* const what = signal == SIGPROF ? "endless" : "crash";
  const int length = std::snprintf(text, sizeof text, "{\"failures\": [{\"seed\": %llu, \"what\": \"%s\"}]}\n",
                                   static_cast<unsigned long long>(playing), what);
  if (write(STDOUT_FILENO, text, static_cast<std::size_t>(length)) != length) _exit(3);
  _exit(1);
}

bool clean(const std::string& json) { return json.find("\"failures\": []") != std::string::npos; }

int explore_to_first(const ExploreOptions& options) {
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGPROF}) std::signal(signal, tell_seed);
  for (std::uint64_t i = 0; i < options.seeds; ++i) {
    ExploreOptions one = options;
    one.first_seed = playing = options.first_seed + i;
    one.seeds = 1;
    const itimerval most{.it_interval = {}, .it_value = {.tv_sec = kSeedMost_s, .tv_usec = 0}};
    setitimer(ITIMER_PROF, &most, nullptr);
    const std::string found = telegrad::explorer::explore(one);
    if (clean(found)) continue;
    std::cout << found << '\n';
    return 1;
  }
  std::cout << "{\"failures\": []}\n";
  return 0;
}

int run(int argc, char** argv) {
  ExploreOptions options;
  bool stops = false;
  const char* seed_to_replay = nullptr;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--stop") {
      stops = true;
      continue;
    }
    if (++i == argc) {
      std::cerr << name << " needs a value\n";
      return 2;
    }
    const std::string value = argv[i];
    if (name == "--first-seed") {
      options.first_seed = std::stoull(value);
    } else if (name == "--seeds") {
      options.seeds = std::stoull(value);
    } else if (name == "--ranks") {
      const std::size_t dots = value.find("..");
      options.first_ranks = static_cast<Rank>(std::stoul(value));
      options.last_ranks =
          dots == std::string::npos ? options.first_ranks : static_cast<Rank>(std::stoul(value.substr(dots + 2)));
    } else if (name == "--only") {
      options.only = value;
    } else if (name == "--replay") {
      seed_to_replay = argv[i];
    } else {
      std::cerr << "no option " << name << '\n';
      return 2;
    }
  }
  if (stops) return explore_to_first(options);
  if (seed_to_replay != nullptr) {
    const auto again = telegrad::explorer::replay(std::stoull(seed_to_replay), options.first_ranks, options.last_ranks);
    std::cout << again.verdict << '\n';
    std::cerr << again.trace;
    return again.verdict.find("\"findings\": []") == std::string::npos ? 1 : 0;
  }
  const std::string found = telegrad::explorer::explore(options);
  std::cout << found << '\n';
  return clean(found) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
