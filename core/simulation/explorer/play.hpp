#pragma once
// Runs a program in a Simulation and keeps all that its ranks could have seen of it. It does not judge.

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "simulation/explorer/program.hpp"
#include "simulation/explorer/topk.hpp"
#include "transport/failure.hpp"

namespace telegrad::explorer {

inline constexpr double kNever_s = std::numeric_limits<double>::infinity();

/// A call of one rank, and its memory when all was over.
struct SeenCall {
  bool called = false;                   // handed to the simulation
  bool done = false;
  double called_s = kNever_s;            // when the rank called it
  double began_s = kNever_s;             // when the collective itself began
  double done_s = kNever_s;
  std::optional<Failure> failure{};      // if done
  std::vector<std::byte> memory{};       // the input; the output too where it is in place
  std::vector<std::byte> before{};       // what `memory` held at the call
  std::vector<std::byte> output{};       // filled with kPoison at the call; empty where it is in place
  bool in_place = false;
  std::optional<bool> dense_result{};    // of a sparse result in a vector of its own; its content is in the next two
  std::vector<std::uint32_t> indices{};
  std::vector<std::byte> values{};
  std::vector<float> lost{};             // what rounding has lost, if it is handed back
  std::optional<SeenTopk> topk{};        // of a call that keeps a part of a sum, if it has a result

  bool succeeded() const { return done && !failure; }
  const std::vector<std::byte>& result() const { return in_place ? memory : output; }
};
inline constexpr std::byte kPoison{0xa5};

struct SeenRank {
  std::vector<SeenCall> calls{};
  bool died = false;
  bool frozen = false;                 // in the end
  std::optional<Failure> verdict{};    // of its session
  bool failing = false;                // its session has stopped, perhaps without a verdict yet
};

struct Seen {
  std::vector<SeenRank> ranks{};
  double end_s = 0.0;
  std::uint64_t events = 0;
  std::uint64_t trace_hash = 0;
  std::string trace_text{};
};

Seen play(const Program& program, bool keep_trace = false);

}  // namespace telegrad::explorer
