// The verdict on a failure: the same for everybody who has heard the same, in whatever order.
#include "testing.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "session/agreement.hpp"

namespace {

using namespace telegrad;

constexpr Call kSum{.operation = Operation::allreduce, .dtype = DType::f32, .count = 10};
constexpr Call kLonger{.operation = Operation::allreduce, .dtype = DType::f32, .count = 11};
constexpr Call kBarrier{.operation = Operation::barrier};

Statement lost(Rank origin, Rank culprit) {
  return {.kind = FailureKind::peer_failed, .origin = origin, .culprit = culprit, .reason = "cut"};
}
Statement timed_out(Rank origin, std::uint32_t called) {
  return {.kind = FailureKind::timeout, .origin = origin, .sequence = 5, .reason = "timed out", .called = called};
}
Statement saw_mismatch(Rank origin, Rank culprit, std::vector<Call> calls, std::uint32_t first_call = 5) {
  const auto called = first_call + static_cast<std::uint32_t>(calls.size());
  return {.kind = FailureKind::mismatched_call,
          .origin = origin,
          .culprit = culprit,
          .sequence = 5,
          .reason = "differs",
          .called = called,
          .first_call = first_call,
          .calls = std::move(calls)};
}

// As rank `self` of statements.size() ranks; an empty origin means that the rank said nothing.
Agreement::Verdict verdict_of(const std::vector<Statement>& statements, Rank self) {
  Agreement agreement(static_cast<Rank>(statements.size()), self);
  for (Rank rank = 0; rank < statements.size(); ++rank) {
    if (statements[rank].origin != kNoRank) agreement.add(rank, statements[rank]);
  }
  return agreement.verdict();
}

void expect_same(const std::vector<Statement>& statements, FailureKind kind, Rank culprit) {
  for (Rank self = 0; self < statements.size(); ++self) {
    if (statements[self].origin == kNoRank) continue;
    const auto verdict = verdict_of(statements, self);
    EXPECT_EQ(verdict.culprit, culprit);
    if (self != culprit) EXPECT_EQ(verdict.kind, kind);
  }
}

TEST("the minority called wrongly; without one whoever differs from the lowest rank") {
  expect_same({saw_mismatch(0, 1, {kSum}), saw_mismatch(1, 2, {kLonger}), saw_mismatch(2, 1, {kSum})},
              FailureKind::mismatched_call, 1);
  expect_same({saw_mismatch(0, 1, {kLonger}), saw_mismatch(1, 0, {kSum}), saw_mismatch(2, 0, {kSum})},
              FailureKind::mismatched_call, 0);
  expect_same({saw_mismatch(0, 1, {kSum}), saw_mismatch(1, 0, {kLonger})}, FailureKind::mismatched_call, 1);
  const auto verdict =
      verdict_of({saw_mismatch(0, 1, {kLonger}), saw_mismatch(1, 0, {kSum}), saw_mismatch(2, 0, {kSum})}, 2);
  EXPECT_EQ(verdict.reason, "the ranks called different things as operation 5: ranks 1, 2 called " + describe(kSum) +
                                ", rank 0 called " + describe(kLonger));
}

TEST("the first operation that differs counts, also where the ranks are at different ones") {
  const auto verdict = verdict_of({saw_mismatch(0, 1, {kBarrier, kSum, kBarrier}, 4),
                                   saw_mismatch(1, 0, {kBarrier, kBarrier}, 4), saw_mismatch(2, 1, {kSum, kBarrier, kSum})},
                                  0);
  EXPECT_EQ(verdict.sequence, 5);
  EXPECT_EQ(verdict.culprit, 1);
}

TEST("a mismatch that only one has seen is believed") {
  expect_same({saw_mismatch(0, 1, {kSum}), {}}, FailureKind::mismatched_call, 1);
}

TEST("a time-out between ranks that called different things is a mismatch") {
  auto first = timed_out(0, 6);
  first.first_call = 5;
  first.calls = {kSum};
  auto second = timed_out(1, 6);
  second.first_call = 5;
  second.calls = {kBarrier};
  expect_same({first, second}, FailureKind::mismatched_call, 1);
}

TEST("a rank that could still speak has ended in consequence") {
  expect_same({lost(0, 1), lost(1, 2), {}}, FailureKind::peer_failed, 2);
  expect_same({lost(0, 1), lost(1, 0), lost(2, 1)}, FailureKind::peer_failed, 0);  // nobody is dead: a cut cable
}

TEST("who is missed only when others have been accused is not the cause, though its word has not come") {
  Agreement agreement(3, 2);
  agreement.add(2, lost(2, 1));
  agreement.lose(1, "killed");
  agreement.lose(0, "gone");
  EXPECT_EQ(agreement.verdict().culprit, 1U);
}

TEST("a rank that has left is the cause, also where it listens still, and another ends in consequence without a word") {
  Agreement agreement(3, 0);
  for (const Rank rank : {Rank{0}, Rank{1}}) agreement.add(rank, lost(0, 1));  // rank 1 says what it has heard of itself
  agreement.lose(2, "Connection reset by remote peer");
  EXPECT_EQ(agreement.verdict().culprit, 1);
  EXPECT_EQ(agreement.verdict().reason, "cut");
}

TEST("a rank that says so itself is the cause, and others name the same text") {
  const Statement own{.kind = FailureKind::transport, .origin = 2, .culprit = 2, .reason = "LookupError"};
  const std::vector<Statement> all{lost(0, 2), own, own};
  expect_same(all, FailureKind::peer_failed, 2);
  EXPECT_EQ(verdict_of(all, 0).reason, "LookupError");
  EXPECT_EQ(verdict_of(all, 2).kind, FailureKind::transport);
}

TEST("who heard of it only through another names it as those do who heard it themselves") {
  const Statement own{.kind = FailureKind::transport, .origin = 2, .culprit = 2, .reason = "gave up"};
  const Statement silent{};
  expect_same({own, own, silent}, FailureKind::peer_failed, 2);
  expect_same({own, lost(1, 2), own}, FailureKind::peer_failed, 2);
  EXPECT_EQ(verdict_of({own, own, silent}, 0).reason, "gave up");
}

TEST("damage is told as such, also by who has sent it") {
  const Statement damage{.kind = FailureKind::transport, .origin = 0, .culprit = 1, .reason = "nonsense"};
  expect_same({damage, damage, damage}, FailureKind::transport, 1);
  EXPECT_EQ(verdict_of({damage, damage, damage}, 1).kind, FailureKind::transport);
}

TEST("a time-out is the fault of who has not called") {
  expect_same({timed_out(0, 6), timed_out(0, 5), timed_out(2, 6)}, FailureKind::timeout, 1);
  expect_same({timed_out(0, 6), timed_out(0, 5), {}}, FailureKind::timeout, 1);
  auto waiting = timed_out(0, 6);
  waiting.culprit = 2;
  EXPECT_EQ(verdict_of({waiting, waiting, waiting}, 1).culprit, 2);
  EXPECT(verdict_of({waiting, waiting, waiting}, 1).reason.find("all ranks have called it") != std::string::npos);
  EXPECT_EQ(verdict_of({waiting, waiting, waiting, {}}, 1).culprit, 3);
}

TEST("the order in which statements come does not matter") {
  const Statement own{.kind = FailureKind::transport, .origin = 2, .culprit = 2, .reason = "LookupError"};
  const Statement damage{.kind = FailureKind::transport, .origin = 3, .culprit = 1, .reason = "nonsense"};
  const std::vector<std::vector<Statement>> cases{
      {lost(0, 4), saw_mismatch(1, 3, {kSum}), timed_out(2, 6), saw_mismatch(3, 1, {kLonger}), {}},
      {lost(0, 4), lost(1, 3), own, damage, {}},
      {lost(0, 4), lost(1, 3), timed_out(2, 6), damage, {}},
      {lost(0, 4), lost(1, 3), lost(2, 4), timed_out(3, 6), {}},
      {timed_out(0, 6), timed_out(1, 7), timed_out(0, 4), timed_out(3, 5), {}},
  };
  for (const auto& all : cases) {
    std::vector<Rank> order(all.size());
    std::iota(order.begin(), order.end(), 0U);
    const auto expected = verdict_of(all, 0);
    do {
      Agreement agreement(static_cast<Rank>(all.size()), 0);
      for (const Rank rank : order) {
        if (all[rank].origin != kNoRank) agreement.add(rank, all[rank]);
      }
      const auto verdict = agreement.verdict();
      EXPECT_EQ(verdict.culprit, expected.culprit);
      EXPECT_EQ(verdict.reason, expected.reason);
    } while (std::ranges::next_permutation(order).found);
  }
}

TEST("sequence numbers may wrap around") {
  auto first = saw_mismatch(0, 1, {kSum, kSum, kSum}, 0xfffffffeU);
  auto second = saw_mismatch(1, 0, {kSum, kSum, kBarrier}, 0xfffffffeU);
  EXPECT_EQ(verdict_of({first, second}, 0).sequence, 0U);
}

}  // namespace
