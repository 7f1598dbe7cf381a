#pragma once
// What a play must not show. Pure: what was seen goes in, findings come out.
//
// The promise (docs/reference/errors.md, "What is guaranteed"): every call of every surviving rank ends. Either it succeeded, and
// then every bit is right, or, where the order of additions shows, the same on all ranks and no further off than
// rounding explains; or it failed, and then all survivors name the same culprit, and the right one. An output is
// not written before everybody has called.

#include <string>
#include <vector>

#include "simulation/explorer/play.hpp"
#include "simulation/explorer/program.hpp"

namespace telegrad::explorer {

enum class Sort : std::uint8_t { hang, wrong_result, wrong_error };
const char* name_of(Sort sort);

struct Finding {
  Sort sort;
  std::string text;
};

struct Verdict {
  std::vector<Finding> findings{};  // the worst sort first; empty: all is well
  std::uint64_t calls = 0;          // of all ranks
  std::uint64_t results = 0;        // successes whose every bit was compared
  bool error_named = false;         // something failed, and the right rank was named
};

Verdict judge(const Program& program, const Seen& seen);

/// Who may be blamed, and how.
struct Blame {
  std::vector<Rank> culprits{};      // kNoRank: nobody
  bool anybody = false;              // no rank can know: any one, but all the same
  std::vector<FailureKind> kinds{};  // empty: nothing may fail
  Rank exempt = kNoRank;             // whose own operations may fail in any way
};
Blame blame_of(const Program& program, const Seen& seen);

}  // namespace telegrad::explorer
