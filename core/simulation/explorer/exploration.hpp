#pragma once
// Many seeds, one after another, and what they showed, as JSON.

#include <cstdint>
#include <string>

#include "simulation/explorer/judge.hpp"

namespace telegrad::explorer {

struct ExploreOptions {
  std::uint64_t first_seed = 0;
  std::uint64_t seeds = 1;
  Rank first_ranks = 2;
  Rank last_ranks = 33;
  std::string only{};        // the name of a trouble: seeds of others are passed over; empty: all
  bool stop_at_first = false;  // finding
};

/// {"seeds", "ranks_most", "operations", "results", "events", "hangs", "wrong", "wrong_errors",
///  "errors_named", "troubles": {name: seeds}, "failures": [{"seed", "what", "detail"}]}
/// Throws std::invalid_argument for a range of ranks that is empty or begins below 2, and for an unknown trouble.
std::string explore(const ExploreOptions& options);

struct Replay {
  std::string verdict;  // {"seed", "program", "findings": [{"what", "detail"}], "failures": [the verdicts of ranks]}
  std::uint64_t trace_hash = 0;
  std::string trace;
};
Replay replay(std::uint64_t seed, Rank first_ranks, Rank last_ranks);

}  // namespace telegrad::explorer
