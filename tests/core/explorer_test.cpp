// The explorer itself: what it draws repeats, its bound on time holds, and its judge notices every lie.
#include "testing.hpp"

#include <algorithm>
#include <functional>
#include <set>
#include <string>

#include "simulation/explorer/exploration.hpp"
#include "simulation/explorer/values.hpp"

namespace {

using namespace telegrad;
using namespace telegrad::explorer;

constexpr Rank kFirst = 2;
constexpr Rank kLast = 33;

// The first program from `seed` on that is as wanted.
Program find_program(const std::function<bool(const Program&)>& wanted, std::uint64_t seed = 0) {
  for (;; ++seed) {
    Program program = draw(seed, kFirst, kLast);
    if (wanted(program)) return program;
  }
}

// A program without trouble that calls `operation` at first, and more than a few elements of it.
Program calm(Operation operation, std::uint64_t seed = 0) {
  return find_program(
      [&](const Program& program) {
        const PlannedCall& call = program.calls[0][0];
        return program.trouble == Trouble::none && call.operation == operation &&
               (operation == Operation::barrier || call.count > 8);
      },
      seed);
}

bool found(const Verdict& verdict, Sort sort, const std::string& part) {
  return std::ranges::any_of(verdict.findings, [&](const Finding& finding) {
    return finding.sort == sort && finding.text.find(part) != std::string::npos;
  });
}

TEST("no seed shows a hang or a wrong result, and every trouble is drawn") {
  const std::string json = explore({.first_seed = 7'000'000, .seeds = 600});
  EXPECT(json.find("\"seeds\": 600") != std::string::npos);
  EXPECT(json.find("\"hangs\": 0") != std::string::npos);
  EXPECT(json.find("\"wrong\": 0") != std::string::npos);
  EXPECT(json.find("\": 0,", json.find("troubles")) == std::string::npos);
  EXPECT_EQ(explore({.first_seed = 7'000'000, .seeds = 600}), json);
}

TEST("programs have all sizes, small ones more often") {
  std::set<Rank> sizes;
  int small = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    const Rank size = draw(seed, kFirst, kLast).size;
    sizes.insert(size);
    if (size <= 9) ++small;
  }
  EXPECT_EQ(sizes.size(), kLast - kFirst + 1);
  EXPECT_EQ(*sizes.begin(), kFirst);
  EXPECT_EQ(*sizes.rbegin(), kLast);
  EXPECT(small > 1500);
  EXPECT_EQ(draw(5, 7, 7).size, Rank{7});
}

TEST("a seed replays byte for byte, and another one does not") {
  for (std::uint64_t seed = 0; seed < 120; ++seed) {
    const Replay once = replay(seed, kFirst, kLast);
    const Replay again = replay(seed, kFirst, kLast);
    EXPECT_EQ(once.trace_hash, again.trace_hash);
    EXPECT_EQ(once.trace, again.trace);
    EXPECT_EQ(once.verdict, again.verdict);
    EXPECT(!once.trace.empty());
    EXPECT(once.trace_hash != replay(seed + 1, kFirst, kLast).trace_hash);
  }
}

TEST("keeping a trace does not change what happens") {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    EXPECT_EQ(play(draw(seed, kFirst, kLast)).trace_hash, replay(seed, kFirst, kLast).trace_hash);
  }
}

TEST("without trouble everything is over in the time that time-outs are measured by") {
  for (std::uint64_t seed = 0; seed < 800; ++seed) {
    const Program program = draw(seed, kFirst, kLast);
    if (program.trouble > Trouble::pause) continue;
    const Seen seen = play(program);
    EXPECT(seen.end_s <= program.busy_s);
    const Verdict verdict = judge(program, seen);
    EXPECT(verdict.findings.empty());
    EXPECT_EQ(verdict.results, verdict.calls);
  }
}

TEST("some benign programs outlast liveness_timeout_s, so that heartbeats matter") {
  int long_ones = 0;
  for (std::uint64_t seed = 0; seed < 800; ++seed) {
    const Program program = draw(seed, kFirst, kLast);
    if (program.trouble != Trouble::none || !program.session.liveness_timeout_s) continue;
    if (play(program).end_s > 2.0 * *program.session.liveness_timeout_s) ++long_ones;
  }
  EXPECT(long_ones >= 3);
}

TEST("the expected sum is right where it can be written by hand") {
  const PlannedCall call{.operation = Operation::allreduce, .dtype = DType::f32, .reduction = Reduction::avg, .count = 40};
  const Expected expected = expected_sum(call, 3, {&call, &call, &call});
  for (std::size_t i = 0; i < call.count; ++i) {
    int sum = 0;
    for (Rank rank = 0; rank < 3; ++rank) sum += Contribution(call, rank, 3).value(i);
    float got = 0.0F;
    std::memcpy(&got, expected.dense.data() + 4 * i, 4);
    EXPECT_EQ(got, static_cast<float>(sum) * (1.0F / 3.0F));
  }
  EXPECT_EQ(expected.indices.size(), 0);
  std::byte two[2];
  EXPECT_EQ(put_value(DType::bf16, two, -3.0F), 2);
  EXPECT_EQ(static_cast<int>(two[1]), 0xc0);
  EXPECT_EQ(static_cast<int>(two[0]), 0x40);
}

TEST("the judge sees one wrong bit in any result") {
  for (const Operation operation : {Operation::allreduce, Operation::sparse_allreduce, Operation::allgather,
                                    Operation::broadcast}) {
    for (std::uint64_t seed = 0; seed < 3000; seed += 300) {
      const Program program = calm(operation, seed);
      Seen seen = play(program);
      REQUIRE(judge(program, seen).findings.empty());
      for (const Rank rank : {Rank{0}, program.size - 1}) {
        SeenCall& call = seen.ranks[rank].calls[0];
        auto& bytes = call.dense_result ? call.values : call.in_place ? call.memory : call.output;
        if (bytes.empty()) continue;
        const std::size_t at = bytes.size() - 1 - bytes.size() / 3;
        bytes[at] ^= std::byte{1};
        EXPECT(found(judge(program, seen), Sort::wrong_result, "operation 0"));
        bytes[at] ^= std::byte{1};
      }
    }
  }
}

TEST("the judge sees a changed input, a result that comes too early, and a result of unlike calls") {
  const Program program = find_program([](const Program& one) {
    const PlannedCall& call = one.calls[0][0];
    return one.trouble == Trouble::none && call.operation == Operation::allreduce && call.count > 8 &&
           !Contribution(call, 0, one.size).in_place();
  });
  Seen seen = play(program);
  SeenCall& call = seen.ranks[0].calls[0];
  call.memory[3] ^= std::byte{4};
  EXPECT(found(judge(program, seen), Sort::wrong_result, "the input has changed"));
  call.memory[3] ^= std::byte{4};
  SeenCall& last = seen.ranks[program.size - 1].calls[0];
  const double began_s = std::exchange(last.began_s, call.done_s + 1.0);
  EXPECT(found(judge(program, seen), Sort::wrong_result, "succeeded before rank"));
  last.began_s = kNever_s;
  EXPECT(found(judge(program, seen), Sort::wrong_result, "written before all ranks had called it"));
  last.began_s = began_s;
  Program unlike = program;
  unlike.calls[1][0].count += 1;
  EXPECT(found(judge(unlike, seen), Sort::wrong_result, "not all ranks called it alike"));
}

TEST("the judge sees a hang") {
  const Program program = calm(Operation::barrier);
  Seen seen = play(program);
  seen.ranks[1].calls[0].done = false;
  EXPECT(found(judge(program, seen), Sort::hang, "rank 1, operation 0: never ends"));
  seen.ranks[1].calls[0].called = false;
  EXPECT(found(judge(program, seen), Sort::hang, "rank 1, operation 0: was never reached"));
}

TEST("the judge sees a failure out of nothing, a wrong culprit, a wrong kind and a disagreement") {
  const Program quiet = calm(Operation::allreduce);
  Seen fine = play(quiet);
  fine.ranks[0].calls[0].failure = Failure{.kind = FailureKind::timeout, .rank = 0, .reason = "late"};
  EXPECT(found(judge(quiet, fine), Sort::wrong_error, "nothing had happened"));

  std::uint64_t seed = 0;
  while (true) {
    const Program program =
        find_program([](const Program& one) { return one.trouble == Trouble::kill && one.size >= 4; }, seed);
    seed = program.seed + 1;
    Seen seen = play(program);
    const Verdict honest = judge(program, seen);
    REQUIRE(honest.findings.empty());
    const Rank witness = program.culprit == 0 ? 1 : 0;
    SeenRank& rank = seen.ranks[witness];
    const auto failed = std::ranges::find_if(rank.calls, [](const SeenCall& call) { return call.failure.has_value(); });
    if (failed == rank.calls.end()) continue;
    EXPECT(honest.error_named);
    const Rank innocent = (std::max(program.culprit, witness) + 1) % program.size;
    const Failure truth = *failed->failure;
    failed->failure->peer = innocent;
    EXPECT(found(judge(program, seen), Sort::wrong_error, "not the culprit"));
    failed->failure = truth;
    failed->failure->kind = FailureKind::timeout;
    EXPECT(found(judge(program, seen), Sort::wrong_error, "not the right kind"));
    failed->failure = truth;
    failed->failure->rank = innocent;
    EXPECT(found(judge(program, seen), Sort::wrong_error, "reported by another rank"));
    failed->failure = truth;
    rank.verdict->peer = innocent;
    EXPECT(found(judge(program, seen), Sort::wrong_error, "disagrees"));
    break;
  }
}

TEST("in a mismatch the majority is right, in a tie the group of the lowest rank") {
  Program program = calm(Operation::allreduce);
  while (program.size < 4) program = calm(Operation::allreduce, program.seed + 1);
  program.trouble = Trouble::count;
  const Seen seen = play(program);
  const auto culprit = [&] { return blame_of(program, seen).culprits; };
  EXPECT(culprit().empty());  // all alike: nobody is to blame
  program.calls[2][0].count += 1;
  EXPECT_EQ(culprit(), std::vector<Rank>{2});
  program.calls = std::vector(4, program.calls[0]);
  program.size = 4;
  program.calls[0][0].count += 1;
  program.calls[3][0].count += 1;
  EXPECT_EQ(culprit(), std::vector<Rank>{1});
  program.calls[2].clear();
  EXPECT_EQ(culprit(), std::vector<Rank>{2});
}

TEST("calls that agree are cut into the same segments") {
  int cut = 0;
  for (std::uint64_t seed = 0; seed < 4000; ++seed) {
    const Program program = draw(seed, kFirst, 3);
    std::vector<PlannedCall> calls;
    for (const auto& its : program.calls) calls.insert(calls.end(), its.begin(), its.end());
    for (const PlannedCall& a : calls) {
      for (const PlannedCall& b : calls) {
        if (program.trouble == Trouble::algorithm || !a.agrees(b, program.size)) continue;
        EXPECT_EQ(a.tuning.has_value(), b.tuning.has_value());
        if (!a.tuning || !b.tuning) continue;
        ++cut;
        EXPECT_EQ(a.tuning->message_bytes, b.tuning->message_bytes);
        EXPECT_EQ(a.tuning->lanes, b.tuning->lanes);
      }
    }
  }
  EXPECT(cut > 1000);
}

TEST("exploring and replaying refuse what makes no sense") {
  EXPECT_THROWS(std::invalid_argument, "no range", explore({.first_ranks = 1}));
  EXPECT_THROWS(std::invalid_argument, "no range", explore({.first_ranks = 9, .last_ranks = 8}));
  EXPECT_THROWS(std::invalid_argument, "no trouble", explore({.only = "sunshine"}));
  EXPECT_THROWS(std::invalid_argument, "no range", replay(1, 5, 4));
  EXPECT(explore({.seeds = 300, .only = "kill"}).find("\"freeze\": 0") != std::string::npos);
}

}  // namespace
