// The explorer itself: what it draws repeats, its bound on time holds, and its judge notices every lie.
#include "testing.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "explorer_programs.hpp"
#include "simulation/explorer/exploration.hpp"
#include "simulation/explorer/values.hpp"
#include "transport/transport.hpp"

namespace {

using namespace telegrad;
using namespace telegrad::explorer;

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
  for (std::uint64_t seed = 0; seed < 1600; ++seed) {
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
    float sum = 0.0F;
    for (Rank rank = 0; rank < 3; ++rank) sum += Contribution(call, rank, 3).value(i);
    float got = 0.0F;
    std::memcpy(&got, expected.dense.data() + 4 * i, 4);
    EXPECT_EQ(got, sum * (1.0F / 3.0F));
  }
  EXPECT_EQ(expected.indices.size(), 0);
  std::byte two[2];
  EXPECT_EQ(put_value(DType::bf16, two, -3.0F), 2);
  EXPECT_EQ(static_cast<int>(two[1]), 0xc0);
  EXPECT_EQ(static_cast<int>(two[0]), 0x40);
}

TEST("the judge sees one wrong bit in any result") {
  for (const Operation operation : {Operation::allreduce, Operation::sparse_allreduce, Operation::allgather,
                                    Operation::broadcast, Operation::gather, Operation::scatter,
                                    Operation::all_to_all, Operation::send, Operation::sparse_allgather,
                                    Operation::sparse_reduce_scatter}) {
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

TEST("sums of integers are drawn of every type, and one wrong bit of them is seen") {
  for (const Operation operation : {Operation::allreduce, Operation::reduce, Operation::reduce_scatter,
                                    Operation::sparse_allreduce, Operation::sparse_reduce_scatter}) {
    for (const DType dtype : {DType::i32, DType::i64, DType::u32, DType::u64}) {
      const Program program = find_program([&](const Program& one) {
        const PlannedCall& call = one.calls[0][0];
        return one.trouble == Trouble::none && call.operation == operation && call.dtype == dtype && call.count > 8;
      });
      Seen seen = play(program);
      REQUIRE(judge(program, seen).findings.empty());
      for (SeenRank& rank : seen.ranks) {
        SeenCall& call = rank.calls[0];
        auto& bytes = call.dense_result || !call.values.empty() ? call.values : call.in_place ? call.memory : call.output;
        if (bytes.empty() || operation == Operation::reduce) continue;  // of which some ranks get nothing
        bytes.back() ^= std::byte{0x80};
        EXPECT(found(judge(program, seen), Sort::wrong_result, "operation 0"));
        bytes.back() ^= std::byte{0x80};
      }
    }
  }
}

// A program without trouble whose first call is of `operation` and adds rounded floats of `dtype` densely.
Program rounding(Operation operation, DType dtype, std::uint64_t seed) {
  return find_program(
      [&](const Program& program) {
        const PlannedCall& call = program.calls[0][0];
        return program.trouble == Trouble::none && call.operation == operation && call.dtype == dtype && call.rounded &&
               call.count > 8;
      },
      seed);
}

std::vector<std::byte>& dense_bytes(SeenCall& call) {
  return call.dense_result ? call.values : call.in_place ? call.memory : call.output;
}

TEST("the judge sees where ranks rounded differently, and by one rank's last bit only") {
  for (const Operation operation : {Operation::allreduce, Operation::sparse_allreduce}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      int forged = 0;
      for (std::uint64_t seed = 0; forged < 5; ++seed) {
        const Program program = rounding(operation, dtype, seed);
        seed = program.seed;
        Seen seen = play(program);
        REQUIRE(judge(program, seen).findings.empty());
        auto& bytes = dense_bytes(seen.ranks[program.size - 1].calls[0]);
        if (bytes.empty()) continue;
        ++forged;
        // The lowest byte comes first: it is the end of a mantissa.
        bytes[bytes.size() / 2 / size_of(dtype) * size_of(dtype)] ^= std::byte{1};
        EXPECT(found(judge(program, seen), Sort::wrong_result, "not the bits that rank 0 has"));
      }
    }
  }
}

TEST("the judge sees a sum that is further off than rounding explains, also where all ranks agree on it") {
  for (const Operation operation : {Operation::allreduce, Operation::sparse_allreduce}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const std::size_t element = size_of(dtype);
      int forged = 0;
      for (std::uint64_t seed = 0; forged < 5; ++seed) {
        const Program program = rounding(operation, dtype, seed);
        seed = program.seed;
        Seen seen = play(program);
        const PlannedCall& plan = program.calls[0][0];
        const Expected expected =
            expected_sum(plan, program.size, std::vector<const PlannedCall*>(program.size, &plan));
        REQUIRE(expected.sums.size() == plan.count && expected.dense.empty());
        const std::size_t at = plan.count / 2;
        const auto forge = [&](double errors) {  // everywhere; false: some rank has no dense result
          const double value = expected.sums[at] + errors * expected.errors_most[at];
          for (SeenRank& rank : seen.ranks) {
            auto& bytes = dense_bytes(rank.calls[0]);
            if (rank.calls[0].dense_result == false || bytes.size() != plan.bytes()) return false;
            (void)put_value(dtype, bytes.data() + at * element, static_cast<float>(value));
          }
          return true;
        };
        if (expected.errors_most[at] == 0.0 || !forge(0.0)) continue;
        ++forged;
        EXPECT(judge(program, seen).findings.empty());
        REQUIRE(forge(3.0));
        EXPECT(found(judge(program, seen), Sort::wrong_result, "off "));
        REQUIRE(forge(std::numeric_limits<double>::quiet_NaN()));
        EXPECT(found(judge(program, seen), Sort::wrong_result, "off "));
      }
    }
  }
}

TEST("rounded sums depend on the order, and stay within their bound in any") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const PlannedCall call{.operation = Operation::allreduce, .dtype = dtype, .reduction = Reduction::sum, .count = 2000,
                           .rounded = true, .seed = 5};
    constexpr Rank kSize = 7;
    const Expected expected = expected_sum(call, kSize, std::vector<const PlannedCall*>(kSize, &call));
    int differ = 0;
    for (std::size_t i = 0; i < call.count; ++i) {
      std::byte sums[2][4] = {};
      for (Rank turn = 0; turn < kSize; ++turn) {
        const float up = Contribution(call, turn, kSize).value(i);
        const float down = Contribution(call, kSize - 1 - turn, kSize).value(i);
        (void)put_value(dtype, sums[0], value_at(dtype, sums[0]) + up);
        (void)put_value(dtype, sums[1], value_at(dtype, sums[1]) + down);
        std::byte exact[4] = {};
        (void)put_value(dtype, exact, up);
        EXPECT_EQ(value_at(dtype, exact), up);
      }
      const double ends[] = {value_at(dtype, sums[0]), value_at(dtype, sums[1])};
      if (ends[0] != ends[1]) ++differ;
      for (const double end : ends) {
        EXPECT(std::abs(end - expected.sums[i]) <= expected.errors_most[i]);
      }
    }
    EXPECT(differ > 200);
  }
}

TEST("some vectors are long enough to be cut by all that the library cuts them by") {
  int bulk_broadcasts = 0;
  int long_sums = 0;
  int many_entries = 0;
  int many_blocks = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    const Program program = draw(seed, kFirst, kLast);
    for (const PlannedCall& call : program.calls[0]) {
      if (call.operation == Operation::broadcast && call.bytes() > 65536) ++bulk_broadcasts;
      if (call.operation == Operation::allreduce && call.bytes() > Transport::kSliceBytes) ++long_sums;
      if (call.operation != Operation::sparse_allreduce || call.count / program.size <= 65536) continue;
      ++many_blocks;
      const Contribution share(call, 0, program.size);
      std::size_t entries = 0;
      for (std::size_t i = 0; i < call.count / program.size; ++i) entries += share.has(i) ? 1 : 0;
      if (entries * program.size * 8 > Transport::kSliceBytes) ++many_entries;
    }
  }
  EXPECT(bulk_broadcasts > 5);
  EXPECT(long_sums > 15);
  EXPECT(many_blocks > 15);
  EXPECT(many_entries > 5);
}

TEST("vectors of all values and reductions, unequal blocks and messages are drawn") {
  std::map<Operation, std::set<std::pair<DType, Reduction>>> vectors;
  std::set<Operation> uneven;
  std::set<Algorithm> balanced;
  std::set<std::uint32_t> tags;
  int crossing = 0;  // messages of one tag between the same two ranks, which may be under way at once
  int after_another = 0;  // calls that begin with a state
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    const Program program = draw(seed, kFirst, kLast);
    std::set<std::pair<Rank, std::uint32_t>> ways;
    bool is_first = true;
    for (const PlannedCall& call : program.calls[0]) {
      if (call.is_sparse()) vectors[call.operation].insert({call.dtype, call.reduction});
      after_another += call.operation == Operation::allreduce_topk && !std::exchange(is_first, false) ? 1 : 0;
      if (call.slices == Slices::balanced) balanced.insert(call.algorithm);
      if (call.uneven) uneven.insert(call.operation);
      if (!call.is_exchange()) continue;
      tags.insert(call.tag);
      if (!ways.insert({call.root, call.tag}).second && program.window[0] > 1) ++crossing;
      EXPECT(!is_mismatch(program.trouble) && !is_damage(program.trouble));
    }
  }
  EXPECT_EQ(vectors[Operation::sparse_allreduce].size(), 4 * 6 + 4);  // integers are only summed
  EXPECT_EQ(vectors[Operation::sparse_reduce_scatter].size(), 4 * 6 + 4);
  EXPECT_EQ(vectors[Operation::sparse_allgather].size(), 4);
  EXPECT_EQ(vectors[Operation::allreduce_topk].size(), 4 * 2);
  EXPECT(after_another > 50);
  EXPECT_EQ(uneven.size(), 6);
  EXPECT_EQ(balanced.size(), 4);
  EXPECT_EQ(tags.size(), 3);
  EXPECT(crossing > 5);
}

TEST("blocks of unlike lengths hold every element once, and what is sent is what is received") {
  for (const Rank size : {2U, 3U, 7U, 32U}) {
    for (const std::size_t count : {0U, 1U, 50U, 1001U}) {
      const PlannedCall call{.operation = Operation::all_to_all, .dtype = DType::bf16, .count = count, .uneven = true};
      std::size_t all = 0;
      for (Rank rank = 0; rank < size; ++rank) {
        EXPECT_EQ(call.blocks(size, rank).count(), 2 * count);
        all += call.blocks_received(size, rank).count();
        for (Rank sender = 0; sender < size; ++sender) {
          EXPECT_EQ(call.blocks_received(size, rank)[sender].size(), call.blocks(size, sender)[rank].size());
        }
      }
      EXPECT_EQ(all, 2 * count * size);
    }
  }
}

TEST("what every type holds comes back as it was put, and what it does not is rounded to nearest even") {
  std::byte bytes[8];
  const auto through = [&](DType dtype, double value) {
    EXPECT_EQ(put_value(dtype, bytes, value), size_of(dtype));
    return value_at(dtype, bytes);
  };
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (const double value : {0.0, 1.0, -3.0, 0.5, 255.0, 0x1p-14, kInfinity, -kInfinity}) {
      EXPECT_EQ(through(dtype, value), value);
    }
  }
  EXPECT_EQ(through(DType::f16, 2049.0), 2048.0);
  EXPECT_EQ(through(DType::f16, 2051.0), 2052.0);
  EXPECT_EQ(through(DType::f16, 2047.6), 2048.0);
  EXPECT_EQ(through(DType::f16, 65519.0), 65504.0);
  EXPECT_EQ(through(DType::f16, 65520.0), kInfinity);
  EXPECT_EQ(through(DType::f16, 0x1p-24), 0x1p-24);
  EXPECT_EQ(through(DType::f16, 0x1.8p-24), 0x1p-23);
  EXPECT_EQ(through(DType::f16, 0x1p-25), 0.0);
  EXPECT_EQ(through(DType::bf16, 257.0), 256.0);
  EXPECT_EQ(through(DType::bf16, 259.0), 260.0);
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
  seen = play(program);
  seen.ranks[1].failing = true;
  EXPECT(found(judge(program, seen), Sort::hang, "rank 1: has stopped, and never learns why"));
}

TEST("a network that never falls silent is a hang, after a bounded number of events") {
  Program program = calm(Operation::barrier);
  EXPECT(play(program).events < program.events_most / 2);
  program.events_most = 20;
  const Seen seen = play(program);
  EXPECT_EQ(seen.events, 20);
  EXPECT(found(judge(program, seen), Sort::hang, "still busy after 20 events"));
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

TEST("where ranks say goodbye, the majority of those that had called may be right too") {
  Program program = calm(Operation::allreduce);
  while (program.size < 4) program = calm(Operation::allreduce, program.seed + 1);
  program.trouble = Trouble::count;
  Seen seen = play(program);
  program.calls = std::vector(4, program.calls[0]);
  program.size = 4;
  program.calls[0][0].count += 1;
  program.calls[3][0].count += 1;  // two against two
  SeenCall& late = seen.ranks[0].calls[0];
  late.failure = Failure{};
  late.done_s = late.called_s;  // refused at once
  program.parts = false;
  EXPECT_EQ(blame_of(program, seen).culprits, std::vector<Rank>{1});
  program.parts = true;
  const std::vector<Rank> culprits = blame_of(program, seen).culprits;
  EXPECT(std::ranges::find(culprits, 3) != culprits.end());
  EXPECT(std::ranges::find(culprits, 2) == culprits.end());
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
