#include "simulation/explorer/exploration.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <stdexcept>

namespace telegrad::explorer {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char character : text) {
    if (character == '"' || character == '\\') {
      out += '\\';
      out += character;
    } else if (static_cast<unsigned char>(character) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(character));
      out += escape;
    } else {
      out += character;
    }
  }
  return out + '"';
}

void field(std::string& json, const char* name, std::uint64_t value) {
  json += std::string(", \"") + name + "\": " + std::to_string(value);
}

void check(Rank first_ranks, Rank last_ranks) {
  if (first_ranks >= 2 && first_ranks <= last_ranks && last_ranks <= 4096) return;
  throw std::invalid_argument("ranks " + std::to_string(first_ranks) + " to " + std::to_string(last_ranks) +
                              " are no range: use two numbers from 2 to 4096, the smaller first");
}

// One line for people: the worst finding, and how many others there are.
std::string detail_of(const Program& program, const Verdict& verdict) {
  std::string text = verdict.findings.front().text;
  if (verdict.findings.size() > 1) text += " (and " + std::to_string(verdict.findings.size() - 1) + " more)";
  return text + "\n" + describe(program);
}

}  // namespace

std::string explore(const ExploreOptions& options) {
  check(options.first_ranks, options.last_ranks);
  std::optional<Trouble> only;
  if (!options.only.empty()) {
    only = trouble_named(options.only);
    if (!only) throw std::invalid_argument("only='" + options.only + "' is no trouble that the explorer knows");
  }
  std::uint64_t ran = 0, operations = 0, results = 0, events = 0, errors_named = 0, ranks_most = 0;
  std::array<std::uint64_t, 3> sorts{};
  std::array<std::uint64_t, kTroubles> troubles{};
  std::string failures;
  for (std::uint64_t i = 0; i < options.seeds; ++i) {
    const std::uint64_t seed = options.first_seed + i;
    if (only && trouble_of(seed) != *only) continue;
    const Program program = draw(seed, options.first_ranks, options.last_ranks);
    const Seen seen = play(program);
    const Verdict verdict = judge(program, seen);
    ++ran;
    ++troubles[static_cast<std::size_t>(program.trouble)];
    operations += verdict.calls;
    results += verdict.results;
    events += seen.events;
    errors_named += verdict.error_named ? 1 : 0;
    ranks_most = std::max<std::uint64_t>(ranks_most, program.size);
    if (verdict.findings.empty()) continue;
    const Sort worst = verdict.findings.front().sort;
    ++sorts[static_cast<std::size_t>(worst)];
    failures += std::string(failures.empty() ? "" : ", ") + "{\"seed\": " + std::to_string(seed) + ", \"what\": \"" +
                name_of(worst) + "\", \"detail\": " + quoted(detail_of(program, verdict)) + "}";
    if (options.stop_at_first) break;
  }
  std::string json = "{\"seeds\": " + std::to_string(ran);
  field(json, "ranks_most", ranks_most);
  field(json, "operations", operations);
  field(json, "results", results);
  field(json, "events", events);
  field(json, "hangs", sorts[0]);
  field(json, "wrong", sorts[1]);
  field(json, "wrong_errors", sorts[2]);
  field(json, "errors_named", errors_named);
  json += ", \"troubles\": {";
  for (std::size_t i = 0; i < kTroubles; ++i) {
    json += std::string(i == 0 ? "" : ", ") + "\"" + name_of(static_cast<Trouble>(i)) +
            "\": " + std::to_string(troubles[i]);
  }
  return json + "}, \"failures\": [" + failures + "]}";
}

Replay replay(std::uint64_t seed, Rank first_ranks, Rank last_ranks) {
  check(first_ranks, last_ranks);
  const Program program = draw(seed, first_ranks, last_ranks);
  Seen seen = play(program, true);
  const Verdict verdict = judge(program, seen);
  std::string json = "{\"seed\": " + std::to_string(seed) + ", \"program\": " + quoted(describe(program));
  field(json, "events", seen.events);
  json += ", \"findings\": [";
  for (const Finding& finding : verdict.findings) {
    json += std::string(&finding == &verdict.findings.front() ? "" : ", ") + "{\"what\": \"" + name_of(finding.sort) +
            "\", \"detail\": " + quoted(finding.text) + "}";
  }
  json += "], \"failures\": [";
  bool first = true;
  for (const SeenRank& rank : seen.ranks) {
    if (!rank.verdict) continue;
    json += (first ? "" : ", ") + quoted(rank.verdict->message());
    first = false;
  }
  return {json + "]}", seen.trace_hash, std::move(seen.trace_text)};
}

}  // namespace telegrad::explorer
