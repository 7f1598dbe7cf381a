// explore [--first-seed N] [--seeds N] [--ranks A..B] [--only TROUBLE] [--stop] [--replay SEED]: the explorer without
// Python. Prints JSON; its status is 1 if anything was found.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <string>

#include "simulation/explorer/exploration.hpp"

namespace {

using telegrad::Rank;
using telegrad::explorer::ExploreOptions;

int run(int argc, char** argv) {
  ExploreOptions options;
  const char* seed_to_replay = nullptr;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--stop") {
      options.stop_at_first = true;
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
      options.last_ranks = dots == std::string::npos ? options.first_ranks
                                                     : static_cast<Rank>(std::stoul(value.substr(dots + 2)));
    } else if (name == "--only") {
      options.only = value;
    } else if (name == "--replay") {
      seed_to_replay = argv[i];
    } else {
      std::cerr << "no option " << name << '\n';
      return 2;
    }
  }
  if (seed_to_replay != nullptr) {
    const auto replayed =
        telegrad::explorer::replay(std::stoull(seed_to_replay), options.first_ranks, options.last_ranks);
    std::cout << replayed.verdict << '\n';
    std::cerr << replayed.trace;
    return replayed.verdict.find("\"findings\": []") == std::string::npos ? 1 : 0;
  }
  const std::string found = telegrad::explorer::explore(options);
  std::cout << found << '\n';
  return found.find("\"failures\": []") == std::string::npos ? 1 : 0;
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
