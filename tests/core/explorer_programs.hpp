// Programs that tests of the explorer want, and findings that they look for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>

#include "simulation/explorer/judge.hpp"
#include "simulation/explorer/program.hpp"

namespace telegrad::explorer {

inline constexpr Rank kFirst = 2;
inline constexpr Rank kLast = 33;

// The first program from `seed` on that is as wanted.
inline Program find_program(const std::function<bool(const Program&)>& wanted, std::uint64_t seed = 0) {
  for (;; ++seed) {
    Program program = draw(seed, kFirst, kLast);
    if (wanted(program)) return program;
  }
}

// A program without trouble that calls `operation` at first, and more than a few elements of it.
inline Program calm(Operation operation, std::uint64_t seed = 0) {
  return find_program(
      [&](const Program& program) {
        const PlannedCall& call = program.calls[0][0];
        return program.trouble == Trouble::none && call.operation == operation &&
               (operation == Operation::barrier || call.count > 8);
      },
      seed);
}

inline bool found(const Verdict& verdict, Sort sort, const std::string& part) {
  return std::ranges::any_of(verdict.findings, [&](const Finding& finding) {
    return finding.sort == sort && finding.text.find(part) != std::string::npos;
  });
}

}  // namespace telegrad::explorer
