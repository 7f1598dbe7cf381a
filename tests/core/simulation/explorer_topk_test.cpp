// What the explorer's judge says of sums of which a part is kept.
#include "testing.hpp"

#include <cstring>
#include <set>
#include <string>

#include "explorer_programs.hpp"
#include "simulation/explorer/play.hpp"

namespace {

using namespace telegrad;
using namespace telegrad::explorer;

TEST("the judge sees every lie about a sum of which a part is kept") {
  int forged = 0;
  for (std::uint64_t seed = 0; forged < 12; ++seed) {
    const Program program = calm(Operation::allreduce_topk, seed);
    seed = program.seed;
    Seen seen = play(program);
    REQUIRE(judge(program, seen).findings.empty());
    SeenCall& call = seen.ranks[program.size - 1].calls[0];
    SeenTopk& topk = *call.topk;
    if (call.indices.size() < 2 || topk.left_indices.empty() || program.calls[0][0].rounded) continue;
    ++forged;
    const auto lies = [&](const std::string& part) { EXPECT(found(judge(program, seen), Sort::wrong_result, part)); };
    const SeenCall truth = call;
    call.values[size_of(program.calls[0][0].dtype) - 1] ^= std::byte{0x40};
    lies("its entry at ");
    call = truth;
    call.values.erase(call.values.end() - static_cast<std::ptrdiff_t>(size_of(program.calls[0][0].dtype)),
                      call.values.end());
    call.indices.pop_back();
    lies("");
    call = truth;
    topk.left_values[0] ^= std::byte{1};
    lies("what is handed back");
    call = truth;
    topk.report.selected += 1;
    lies("its report counts");
    call = truth;
    topk.report.local_most = 0;
    lies("its report says that no rank has more than 0");
    call = truth;
    topk.after.threshold += 1.0;
    lies("not the sum and the state that rank 0 has");
    call = truth;
    topk.after.calls += 1;
    lies("its state counts");
    call = truth;
    topk.after.lengths.pop_back();
    lies("slices of another vector");
    call = truth;
    topk.report.cut = false;
    if (program.topk.as_published) lies("its slices were not cut anew");
    call = truth;
    topk.report.traffic.entries_sent = 1U << 30;
    if (!program.topk.as_published) lies("words, more than");
    call = truth;
    call.topk.reset();
    lies("without a result");
    call = truth;
    call.failure = Failure{.kind = FailureKind::timeout, .rank = program.size - 1, .reason = "late"};
    lies("failed, and has a result");
  }
}

TEST("kept sums are drawn with every wire that rounds, and the judge sees what rounding cannot have done") {
  std::set<ValueEncoding> drawn;
  int forged = 0;
  for (std::uint64_t seed = 0; drawn.size() < 5 || forged < 5; ++seed) {
    REQUIRE(seed < 100'000);
    const Program program = calm(Operation::allreduce_topk, seed);
    seed = program.seed;
    const ValueEncoding values = program.calls[0][0].wire_values();
    if (values == ValueEncoding::native) continue;
    EXPECT(describe(program.calls[0][0]).find(std::string(", values ") + name_of(values)) != std::string::npos);
    Seen seen = play(program);
    REQUIRE(judge(program, seen).findings.empty());
    drawn.insert(values);
    SeenCall& call = seen.ranks[program.size - 1].calls[0];
    if (call.indices.empty()) continue;
    ++forged;
    float first = 0.0F;
    std::memcpy(&first, call.values.data(), sizeof first);
    first = (first + 1.0F) * 1e6F;
    std::memcpy(call.values.data(), &first, sizeof first);
    EXPECT(found(judge(program, seen), Sort::wrong_result, "its entry at "));
  }
}

TEST("sums are compared across tensors, and the judge sees other weights and mean squares than follow from sums") {
  int weighted = 0, forged = 0, ended = 0;
  for (std::uint64_t seed = 0; weighted < 8 || forged < 3 || ended < 8; ++seed) {
    REQUIRE(seed < 100'000);
    const Program program = draw(seed, kFirst, kLast);
    if (program.trouble != Trouble::none || program.topk.tensors.empty()) continue;
    EXPECT(!program.topk.as_published);
    EXPECT(describe(program).find("compared as tensors of [") != std::string::npos);
    Seen seen = play(program);
    REQUIRE(judge(program, seen).findings.empty());
    for (std::size_t at = 0; at < program.calls[0].size(); ++at) {
      SeenCall& call = seen.ranks[0].calls[at];
      if (!call.topk) continue;
      const SeenCall truth = call;
      const auto lies = [&](const std::string& part) { return found(judge(program, seen), Sort::wrong_result, part); };
      for (double& square : call.topk->after.squares) square += 1.0;
      const bool ends = call.topk->after.calls % program.topk.threshold_every == 0;
      if (!ends) EXPECT(lies("other mean squares of tensors"));
      ended += ends && lies("other mean squares of tensors") ? 1 : 0;
      call = truth;
      std::vector<double>& before = call.topk->before.squares;
      const bool has_weights = std::ranges::any_of(before, [](double square) { return square > 0.0; }) && before.size() > 1;
      if (!has_weights || ends || !call.topk->report.exact || program.calls[0][at].dtype == DType::f16) continue;
      ++weighted;
      before.front() = before.back() > 0.0 ? before.back() * 1e12 : 1e12;
      before.back() = 1e-12;
      call.topk->after.squares = before;
      forged += lies("it keeps ") ? 1 : 0;
      call = truth;
    }
  }
}

TEST("programs train: entries go uncounted, some ranks hold theirs back, and all begin again") {
  int training = 0, uncounted = 0, again = 0;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    const Program program = draw(seed, kFirst, kLast);
    if (program.trouble > Trouble::pause || program.calls[0][0].entries == 0) continue;
    ++training;
    const Seen seen = play(program);
    EXPECT(judge(program, seen).findings.empty());
    for (const SeenCall& call : seen.ranks[0].calls) {
      if (!call.topk || !call.topk->before.spread) continue;
      const std::uint64_t calls = call.topk->before.calls;
      if (calls % program.topk.boundaries_every == 0 || calls % program.topk.threshold_every == 0) continue;
      if (program.topk.k < 36 * program.size) continue;
      ++uncounted;
      again += call.topk->report.cut ? 1 : 0;
    }
  }
  EXPECT(training >= 20);
  EXPECT(uncounted >= 40);
  EXPECT(again >= 8);
}

TEST("the judge sees what rounding cannot have lost, and more than a rank may receive") {
  int forged = 0;
  for (std::uint64_t seed = 0; forged < 5; ++seed) {
    REQUIRE(seed < 100'000);
    const Program program = calm(Operation::allreduce_topk, seed);
    seed = program.seed;
    if (!program.calls[0][0].keeps_lost()) continue;
    ++forged;
    Seen seen = play(program);
    REQUIRE(judge(program, seen).findings.empty());
    SeenCall& call = seen.ranks[program.size - 1].calls[0];
    const SeenCall truth = call;
    call.lost[3] += 1000.0F;
    EXPECT(found(judge(program, seen), Sort::wrong_result, "what rounding has lost differ"));
    call = truth;
    if (program.topk.as_published || call.topk->report.balanced) continue;
    call.topk->report.traffic.entries_received = 1U << 30;
    EXPECT(found(judge(program, seen), Sort::wrong_result, ""));
  }
}

}  // namespace
